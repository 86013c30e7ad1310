"""Parallel layouts: mesh arithmetic, opened process groups, sharded parameters."""
