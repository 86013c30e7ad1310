"""Counter-based random numbers: a draw is a hash of its key and counter, independent of when and where it is made."""

from moefw_kernels.random.reference import mix, salted, stream, token_keys, uniform

__all__ = ["mix", "salted", "stream", "token_keys", "uniform"]
