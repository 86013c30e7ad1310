"""Pipelines: where stages lie, what travels between them, and who plays a schedule."""
