"""Measurements of a loaded model: scores, perplexity, what caches cost, and their plots."""
