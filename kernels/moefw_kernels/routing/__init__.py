"""Arithmetic that routers share: counting choices, dropping those beyond a capacity, auxiliary losses."""

from moefw_kernels.routing.reference import count_choices, load_loss, switch_loss, within_capacity, z_loss

__all__ = ["count_choices", "load_loss", "switch_loss", "within_capacity", "z_loss"]
