"""Adapters to other tools; each module needs the tool it is named after."""
