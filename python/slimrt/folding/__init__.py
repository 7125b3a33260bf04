"""The mathematics of the cache modes: weights folded together, and the error that rounded rows make."""
