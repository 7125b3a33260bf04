"""Helpers that know nothing of models: checked arguments, files, progress bars, units, numerics."""
