"""Time series forecasting with Chronos and Chronos-Bolt (Ansari et al. 2024, "Chronos: Learning the Language of Time
Series"): T5 models whose tokens are quantised values (Chronos), or whose inputs are patches of a series (Bolt)."""
