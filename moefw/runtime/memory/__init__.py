"""Memory between forward and backward and between steps: dropped tensors, static rows, optimizer states."""
