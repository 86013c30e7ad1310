"""Canonical names of experts whose weights are stacked in two parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from moefw.core.records import Canonical, Shard


def stacked_experts(
    numbers: Sequence[int],
    shards: tuple[Shard | None, Shard | None],
    gate_up: nn.Parameter,
    down: nn.Parameter,
    gate_up_bias: nn.Parameter | None,
    down_bias: nn.Parameter | None,
) -> Iterator[Canonical]:
    """Yield each expert's parameters as pieces of ``gate_up`` (e, 2F, D), ``down`` (e, D, F) and of their biases.

    ``numbers``: those of this rank's experts; ``shards``: the part of each that this rank has, of rows and of columns.
    """
    f = down.shape[-1]
    into, out_of = shards
    for local, expert in enumerate(numbers):
        yield Canonical(f"{expert}.gate_proj.weight", gate_up, (local, slice(0, f)), into)
        yield Canonical(f"{expert}.up_proj.weight", gate_up, (local, slice(f, 2 * f)), into)
        yield Canonical(f"{expert}.down_proj.weight", down, (local,), out_of)
        if gate_up_bias is not None and down_bias is not None:
            yield Canonical(f"{expert}.gate_proj.bias", gate_up_bias, (local, slice(0, f)), into)
            yield Canonical(f"{expert}.up_proj.bias", gate_up_bias, (local, slice(f, 2 * f)), into)
            yield Canonical(f"{expert}.down_proj.bias", down_bias, (local,), into)
