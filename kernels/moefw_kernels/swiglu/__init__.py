"""SwiGLU with the routing weight folded in."""

from moefw_kernels.swiglu.reference import weighted_swiglu, weighted_swiglu_backward

__all__ = ["weighted_swiglu", "weighted_swiglu_backward"]
