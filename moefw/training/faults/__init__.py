"""Faults of a run: a rank hangs, dies, leaves or is asked to stop, a value is not finite."""
