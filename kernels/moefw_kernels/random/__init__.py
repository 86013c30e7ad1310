"""Counter-based random numbers: a draw is a hash of what it is for, never of when or where it is made."""

from moefw_kernels.random.reference import mix, stream, token_keys, uniform

__all__ = ["mix", "stream", "token_keys", "uniform"]
