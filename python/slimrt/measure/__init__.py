"""Measurements of models: scores, perplexity, the error of caches, and plots of them."""
