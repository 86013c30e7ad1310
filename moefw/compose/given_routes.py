"""Routes that a caller brings, such as those of rollouts, held against the model before routers replay them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from moefw.compose.assembly import Assembly
from moefw.core.errors import ContractError, Problem
from moefw.core.stages import FREE
from moefw.runtime.replayed_routes import wrong_ids


def layers_of(assembly: Assembly, num_layers: int) -> Sequence[int]:
    """Numbers of the layers with experts that a text is read with: not of those that predict further tokens."""
    return [layer for layer in assembly.layers if layer < num_layers]


def given_by_layer(
    routes: Tensor, ids_BS: Tensor, mask_BS: Tensor | None, assembly: Assembly, num_layers: int
) -> Mapping[int, Tensor]:
    """Expert ids ``(B, S, K)``, int64, by layer, on the device of ``ids_BS``; ``FREE`` where none are given.

    ``routes`` ``(B, S, L, K)`` of any integer dtype has -1 there. For padding, none are given. Raises ContractError
    with everything that is wrong. Values are looked at where ``routes`` lies: on the host, nothing waits for a device.
    """
    layers = layers_of(assembly, num_layers)
    top_k = assembly.site.dims.top_k
    of_all = (*ids_BS.shape, num_layers, top_k)
    of_moe = (*ids_BS.shape, len(layers), top_k)
    if tuple(routes.shape) not in (of_all, of_moe) or routes.is_floating_point() or routes.dtype is torch.bool:
        what = f"routes are {tuple(routes.shape)} {routes.dtype}, and not {of_moe} of an integer dtype."
        fix = f"Give {top_k} expert ids for each position and each layer with experts, or all {num_layers} layers."
        raise ContractError(what, fix)
    routes = routes.int()  # bytes have no -1
    if mask_BS is not None:
        routes = routes.masked_fill(~mask_BS[:, :, None, None].to(routes.device), -1)
    if tuple(routes.shape) == of_all:
        routes = routes[:, :, layers]  # what other engines write for layers without experts means nothing
    by_layer = dict(zip(layers, routes.unbind(2), strict=True))
    problems = [problem for layer, ids_BSK in by_layer.items() for problem in _problems(layer, ids_BSK, assembly)]
    if problems:
        raise ContractError(problems)
    return {
        layer: ids_BSK.masked_fill(ids_BSK < 0, FREE).to(ids_BS.device, torch.int64)
        for layer, ids_BSK in by_layer.items()
    }


def _problems(layer: int, ids_BSK: Tensor, assembly: Assembly) -> Iterator[Problem]:
    """Yield what is wrong with the routes of a layer."""
    wrong = [*wrong_ids(ids_BSK, assembly.site.dims.num_experts)]
    is_absent_BSK = ids_BSK < 0
    partly = is_absent_BSK.any(-1) & ~is_absent_BSK.all(-1)
    if not wrong and partly.any():
        sequence, position = partly.nonzero()[0].tolist()
        wrong.append(("some experts and not all", sequence, position))
    for what, sequence, position in wrong:
        told = ids_BSK[sequence, position].tolist()
        fix = "Give distinct experts, or -1 throughout where the router is to choose."
        yield Problem(f"routes of layer {layer}: sequence {sequence}, position {position} has {what}: {told}.", fix)
