"""Tokens chosen one after the other: options, sampling, beams, and the scheduler of their steps."""
