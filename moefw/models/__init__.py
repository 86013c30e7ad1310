"""The transformer around the MoE layer."""
