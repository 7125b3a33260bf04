"""Conversion of model files: folding, requantising, verifying."""
