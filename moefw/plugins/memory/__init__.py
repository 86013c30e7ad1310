"""Memory policies for activations between forward and backward, and for optimizer states between steps."""
