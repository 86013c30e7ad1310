"""Training: data, loop, optimizer, checkpoints, metrics, launch."""
