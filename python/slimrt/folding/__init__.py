"""The mathematics of the cache modes: folding weights together, and the error that rounding of stored rows causes."""
