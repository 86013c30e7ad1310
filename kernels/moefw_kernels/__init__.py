"""Kernels of moefw: one directory for each op, with a readable reference in plain PyTorch."""
