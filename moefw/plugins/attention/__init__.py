"""Attention: projections around a core."""
