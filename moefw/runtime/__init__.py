"""Code that runs in a step: the MoE layer, communication, compute, memory and parallel layouts."""
