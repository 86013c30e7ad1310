"""Root-mean-square normalisation."""

from moefw_kernels.rmsnorm.reference import rms_norm

__all__ = ["rms_norm"]
