"""Routing replay: the experts that a run chose, recorded step by step, decide in another run."""
