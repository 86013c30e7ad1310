"""Memory policies: what happens to activations between forward and backward."""
