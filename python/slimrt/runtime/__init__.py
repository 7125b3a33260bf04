"""Loaded models: engine, sessions, folding at load."""
