"""Model files made from model files: folded, requantised, verified."""
