"""Traces of steps: what each rank computes, sends and waits for, and when."""
