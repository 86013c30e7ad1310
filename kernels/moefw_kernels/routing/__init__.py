"""Arithmetic that routers share: chosen values, counts of choices, capacity and auxiliary losses."""

from moefw_kernels.routing.reference import chosen, count_choices, load_loss, switch_loss, within_capacity, z_loss

__all__ = ["chosen", "count_choices", "load_loss", "switch_loss", "within_capacity", "z_loss"]
