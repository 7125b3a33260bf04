"""The choice of cache, its validation, and the memory it takes."""
