"""Routes of a text: those that a caller brings for routers to replay, such as rollouts', and those that were chosen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from moefw.compose.assembly import Assembly
from moefw.core.contracts import Layout
from moefw.core.errors import ContractError, Problem
from moefw.core.stages import FREE, LayerStats
from moefw.runtime.parallel.holders import STAGE
from moefw.runtime.parallel.own_tokens import all_tokens, own_tokens
from moefw.runtime.replayed_routes import DIFFERING, GIVEN, wrong_ids


@final
class RoutesOfText:
    """Routes that a model is given, and those that the tokens of its last forward chose."""

    def __init__(self, module: Any, assembly: Assembly, layout: Layout) -> None:
        self._module = module
        self._assembly = assembly
        self._layout = layout
        self._shape: Sequence[int] = ()
        self._chosen: Mapping[int, Tensor] = {}
        """Experts of the last forward by layer: int32, of this rank's tokens of sequences of ``_shape``."""
        self._differences: dict[int, Tensor] = {}

    def own(self, routes: Tensor, ids_BS: Tensor, mask_BS: Tensor | None) -> Mapping[int, Tensor]:
        """``Batch.routes`` of this rank's tokens. Raises ContractError for routes that no router could choose."""
        by_layer = _given_by_layer(routes, ids_BS, mask_BS, self._assembly, self._layers, self._num_layers)
        padding = (0, 0, 0, self._module.padding(ids_BS.shape[1]))
        return {
            layer: own_tokens(self._layout, F.pad(ids_BSK, padding, value=-1)) for layer, ids_BSK in by_layer.items()
        }

    @torch.no_grad()
    def seen(self, shape: Sequence[int], layers: Mapping[int, LayerStats]) -> None:
        """Keep what the layers chose in a forward over ids of ``shape``, ``(B, S)``, and count differences."""
        self._shape = shape
        self._chosen = {layer: stats.expert_ids_TK.int() for layer, stats in layers.items()}
        for layer, of_layer in layers.items():
            if DIFFERING in of_layer.stats:
                counts_2 = torch.stack([of_layer.stats[DIFFERING], of_layer.stats[GIVEN]]).double()
                self._differences[layer] = self._differences.get(layer, 0.0) + counts_2

    @torch.no_grad()
    def chosen(self) -> Tensor:
        """Experts of the last forward, ``(B, S, L, K)`` int16 on the host, -1 for padding. Collective.

        Raises ContractError before a forward.
        """
        if not self._shape:
            raise ContractError("routes() of a model that has read no text.", "Call it behind a forward.")
        sequences, length = self._shape
        width = length + self._module.padding(length)
        top_k = self._assembly.site.dims.top_k
        whole = []
        for layer in self._layers:
            own_tK = self._chosen.get(layer)
            if own_tK is None:  # another stage has the layer
                whole.append(torch.full((sequences, width, top_k), -1, dtype=torch.int32, device=self._device))
            else:
                whole.append(all_tokens(self._layout, own_tK, sequences))
        routes_BSLK = torch.stack(whole, 2)[:, :length].contiguous()
        stages = self._layout.group("pp")
        if stages is not None:
            dist.all_reduce(routes_BSLK, dist.ReduceOp.MAX, group=stages)
        return routes_BSLK.to("cpu", torch.int16)

    def differences(self) -> Mapping[int, tuple[int, int]]:
        """Differing and given choices by layer, of all ranks and since the last call. Collective."""
        layers = self._layers
        counts_L2 = torch.zeros(len(layers), 2, dtype=torch.float64, device=self._device)
        for row, layer in enumerate(layers):
            counts_L2[row] += self._differences.pop(layer, 0.0)
        group = self._layout.group("pp", *STAGE)
        if group is not None:
            dist.all_reduce(counts_L2, group=group)
        counts = zip(layers, counts_L2.long().tolist(), strict=True)
        return {layer: (differing, given) for layer, (differing, given) in counts}

    @property
    def _num_layers(self) -> int:
        num_layers: int = self._module.options.num_layers
        return num_layers

    @property
    def _layers(self) -> Sequence[int]:
        """Numbers of the layers with experts that a text is read with: not of those that predict further tokens."""
        return [layer for layer in self._assembly.layers if layer < self._num_layers]

    @property
    def _device(self) -> torch.device:
        device: torch.device = next(self._module.parameters()).device
        return device


def _given_by_layer(
    routes: Tensor,
    ids_BS: Tensor,
    mask_BS: Tensor | None,
    assembly: Assembly,
    layers: Sequence[int],
    num_layers: int,
) -> Mapping[int, Tensor]:
    """Expert ids ``(B, S, K)``, int64, by layer, on the device of ``ids_BS``; ``FREE`` where none are given.

    ``routes`` ``(B, S, L, K)`` of any integer dtype has -1 there. For padding, none are given. Raises ContractError
    with everything that is wrong. Values are looked at where ``routes`` lies: on the host, nothing waits for a device.
    """
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
