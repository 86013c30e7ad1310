"""Observation of code, on ranks that need not exist: its collectives, and every storage from allocation to end."""
