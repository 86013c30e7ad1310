"""Sequences for an attention, and what it computes of them on a rank of tp."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from attrs import frozen
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from moefw.compose.assembly import Assembly
from moefw.compose.build import ModelParts, Shared, open_layout
from moefw.core.records import Canonical
from moefw.core.stages import Batch
from moefw.models.past import within_reach
from moefw.runtime.naming import canonical_parameters, initialise
from moefw.runtime.parallel.sequence_cut import SequenceCut
from moefw.runtime.parallel.tensor_parallel import TensorParallel
from moefw.testing.layer_case import LayerCase, whole_piece
from moefw.testing.suites.merging import draw_adapters
from moefw.testing.suites.watch import same_bits

Results = dict[str, Tensor]
"""``out`` (B, S, D), and gradients: of ``x`` (B, S, D) and of each parameter by canonical name."""
STD = 0.3


@frozen(kw_only=True)
class AttentionCase:
    """Sequences of one length, each with the lengths of its documents, whose positions go up by ``stride``."""

    documents: tuple[tuple[int, ...], ...] = ((7,), (7,))
    stride: int = 1
    seed: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        """Sequences B, which may be 0, and positions S."""
        positions = sum(self.documents[0]) if self.documents else 5
        return len(self.documents), positions

    def drawn(self, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Tokens, and the gradient of the output, both (B, S, D)."""
        generator = torch.Generator().manual_seed(self.seed)
        x_BSD, probe_BSD = torch.randn(2, *self.shape, dim, generator=generator).to(dtype)
        return x_BSD, probe_BSD

    def batch(self, tp: TensorParallel | None = None, keys_T: Tensor | None = None) -> Batch:
        """Batch, with positions and documents unless both are the default."""
        ids = torch.zeros(self.shape, dtype=torch.int64)
        batch = Batch(ids_BS=ids, labels_BS=ids, part=None if tp is None else tp.shard(0), keys_T=keys_T)
        if self.stride == 1 and all(len(lengths) == 1 for lengths in self.documents):
            return batch
        positions = [torch.cat([torch.arange(length) for length in lengths]) for lengths in self.documents]
        numbers = [torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)) for lengths in self.documents]
        return Batch(
            ids_BS=ids,
            labels_BS=ids,
            positions_BS=torch.stack(positions) * self.stride,
            documents_BS=torch.stack(numbers),
            part=batch.part,
            keys_T=keys_T,
        )


def sequences(multiple: int = 1) -> st.SearchStrategy[AttentionCase]:
    """Strategy for cases whose number of tokens is a multiple of ``multiple``."""
    return st.builds(
        AttentionCase,
        documents=st.builds(
            lambda lengths, count: (_filled(lengths, multiple),) * count,
            st.lists(st.integers(1, 6), min_size=1, max_size=3),
            st.integers(1, 3),
        ),
        stride=st.sampled_from([1, 3]),
        seed=st.integers(0, 1000),
    )


def _filled(lengths: list[int], multiple: int) -> tuple[int, ...]:
    """Lengths with the last one made longer, so that their sum is a multiple."""
    missing = -sum(lengths) % multiple
    return *lengths[:-1], lengths[-1] + missing


def attention_of(layer_case: LayerCase) -> tuple[Any, Assembly, TensorParallel]:
    """Attention of a layer case on this rank, initialised by name."""
    assembly = layer_case.resolve()
    layout = open_layout(assembly, "cpu")
    attention = ModelParts(assembly, layout, torch.device("cpu"), Shared()).attention(0)
    initialise(attention, seed=layer_case.seed, std=lambda _: STD)
    draw_adapters(attention, seed=layer_case.seed)
    return attention, assembly, TensorParallel(layout)


class _Entered:
    """Notes the regions that run."""

    def __init__(self) -> None:
        self.regions = set[str]()

    def inside(self, region: str, layer: int, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            self.regions.add(region)
            return function(*args)

        return run

    def around(self, region: str, layer: int, treated: Callable[..., Any]) -> Callable[..., Any]:
        return treated


def regions_of(layer_case: LayerCase) -> set[str]:
    """Regions that a forward of the attention runs."""
    assembly = layer_case.resolve()
    entered = _Entered()
    parts = ModelParts(assembly, open_layout(assembly, "cpu"), torch.device("cpu"), Shared(), watch=entered)
    case = AttentionCase()
    x_BSD, _ = case.drawn(layer_case.dim, torch.float32)
    begun(parts.attention(0), case, x_BSD)
    return entered.regions


def computed(attention: Any, case: AttentionCase, dim: int, dtype: torch.dtype = torch.float32) -> Results:
    """Output and gradients of a whole attention on one rank."""
    x_BSD, probe_BSD = case.drawn(dim, dtype)
    return finished(attention, *begun(attention, case, x_BSD), probe_BSD)


def begun(attention: Any, case: AttentionCase, x_BSD: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens, which require a gradient, and the output, both (B, S, D)."""
    batch = case.batch()
    x_BSD = x_BSD.clone().requires_grad_()
    out_TD = attention(x_BSD.flatten(0, 1), attention.tables(batch), batch)
    return x_BSD, out_TD.view(x_BSD.shape)


def finished(attention: nn.Module, x_BSD: Tensor, out_BSD: Tensor, probe_BSD: Tensor) -> Results:
    """Output and gradients of what was begun."""
    attention.zero_grad()
    (out_BSD * probe_BSD).sum().backward()
    grads = {piece.name: _grad(piece) for piece in canonical_parameters(attention)}
    return {"out": out_BSD.detach(), "x": _zero(x_BSD.grad, x_BSD), **grads}


def extended(attention: Any, case: AttentionCase, dim: int, pieces: Sequence[int]) -> Iterator[tuple[Tensor, bool]]:
    """Read sequences in ``pieces``, each behind what is kept of those before, with a token of padding at its end.

    Yield the output ``(B, s, D)`` of each, and whether it left the past as it was. No position out of reach is kept.
    """
    x_BSD, _ = case.drawn(dim, torch.float32)
    past = None
    num_before = 0
    for piece_BsD in x_BSD.split(list(pieces), 1):
        length = piece_BsD.shape[1]
        x_BsD = F.pad(piece_BsD, (0, 0, 0, 1), value=3.0)
        ids_BS = torch.zeros(x_BsD.shape[:2], dtype=torch.int64)
        positions_S = num_before + torch.arange(length + 1)
        valid_BS = (positions_S < num_before + length).expand_as(ids_BS)
        positions_BS = positions_S.expand_as(ids_BS)
        batch = Batch(ids_BS=ids_BS, labels_BS=ids_BS, mask_BS=valid_BS, positions_BS=positions_BS)
        tensors_of_past: list[Tensor] = [] if past is None else tree_leaves(past)
        copies = [tensor.clone() for tensor in tensors_of_past]
        out_TD, longer_past = attention.extend(x_BsD.flatten(0, 1), attention.tables(batch), batch, past)
        yield out_TD.view(x_BsD.shape)[:, :length], all(map(same_bits, copies, tensors_of_past))
        past = within_reach(longer_past, attention.reach, padding=1)
        num_before += length


def attended(layer_case: LayerCase, case: AttentionCase) -> Results:
    """Output and gradient of all tokens, and this rank's share of each parameter's gradient, whole."""
    attention, assembly, tp = attention_of(layer_case)
    cut = SequenceCut(open_layout(assembly, "cpu"))
    x_BSD, probe_BSD = (cut.own(drawn) for drawn in case.drawn(layer_case.dim, torch.float32))
    batch = replace(cut.part(case.batch(tp)), cp=cut.size)
    x_tD = batch.own(x_BSD.flatten(0, 1)).clone().requires_grad_()
    out_tD = attention(x_tD, attention.tables(batch), batch)
    (out_tD * batch.own(probe_BSD.flatten(0, 1))).sum().backward()
    shares = {piece.name: whole_piece(piece, _grad(piece)) for piece in canonical_parameters(attention)}
    own = {"out": out_tD.detach(), "x": _zero(x_tD.grad, x_tD)}
    return {name: cut.gather(tp.gather(own_tD).view(x_BSD.shape)) for name, own_tD in own.items()} | shares


def weights_of(attention: nn.Module) -> Mapping[str, Tensor]:
    """Parameters by canonical name in fp64. They require gradients."""
    pieces = canonical_parameters(attention)
    return {piece.name: piece.of(piece.parameter.detach()).double().requires_grad_() for piece in pieces}


def _grad(piece: Canonical) -> Tensor:
    return piece.of(_zero(piece.parameter.grad, piece.parameter)).clone()


def _zero(grad: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if grad is None else grad
