"""Forecasts of time series with Chronos and Chronos-Bolt (Ansari et al. 2024, "Chronos: Learning the Language of Time
Series"), T5 models whose tokens are values or whose rows are patches of a series."""
