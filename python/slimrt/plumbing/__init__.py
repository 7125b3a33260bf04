"""What every part may use and that knows nothing of models: checked arguments, files, bars, units, numbers."""
