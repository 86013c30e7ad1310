"""Kernels of moefw: a directory an op, each with its readable reference first."""
