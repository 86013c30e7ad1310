"""Micro-batches for routers, and checks of a routing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from attrs import frozen
from hypothesis import strategies as st
from torch import Tensor

from moefw.core.stages import Batch, Routing
from moefw.runtime.naming import initialise
from moefw.runtime.parallel.sequence_cut import SequenceCut
from moefw.runtime.parallel.tensor_parallel import TensorParallel
from moefw.testing.layer_case import LayerCase
from moefw.testing.suites.runs import open_context


@frozen(kw_only=True)
class Tokens:
    """A drawn micro-batch: ``masked`` of every three tokens are padding."""

    sequences: int = 2
    positions: int = 4
    masked: int = 0
    seed: int = 0
    dtype: str = "float32"

    @property
    def num_tokens(self) -> int:
        """The number of tokens, T."""
        return self.sequences * self.positions

    def mask(self) -> Tensor | None:
        """Which tokens are valid, bool (B, S); None: all."""
        if not self.masked:
            return None
        return (torch.arange(self.num_tokens).view(self.sequences, self.positions) + self.seed) % 3 >= self.masked

    def x(self, dim: int) -> Tensor:
        """Tokens, ``(T, D)``; a leaf."""
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn(self.num_tokens, dim, generator=generator).to(getattr(torch, self.dtype)).requires_grad_()

    def batch(self, **more: Any) -> Batch:
        """Micro-batch as in training, but without ``loss_scale``, so without auxiliary losses."""
        ids_BS = torch.zeros(self.sequences, self.positions, dtype=torch.int64)
        seeds_B = torch.arange(self.sequences) + 1000 * self.seed
        return Batch(**{"ids_BS": ids_BS, "labels_BS": ids_BS, "mask_BS": self.mask(), "seeds_B": seeds_B, **more})


@frozen(kw_only=True)
class Pack:
    """Sequences of these lengths, one behind another in a row: a micro-batch. The last token of each is padding."""

    lengths: tuple[int, ...]
    seed: int = 0

    def x(self, dim: int) -> Tensor:
        """Tokens, ``(T, D)``."""
        return torch.randn(sum(self.lengths), dim, generator=torch.Generator().manual_seed(self.seed))

    def batch(self) -> Batch:
        """The pack as a micro-batch of training."""
        numbers = torch.arange(len(self.lengths))
        return self._in_a_row(
            torch.cat([_ends_with_padding(length) for length in self.lengths]),
            seeds_B=self._seeds(),
            positions_BS=torch.cat([torch.arange(length) for length in self.lengths]).unsqueeze(0),
            documents_BS=numbers.repeat_interleave(torch.tensor(self.lengths)).unsqueeze(0),
            lengths=self.lengths,
        )

    def alone(self, x_TD: Tensor) -> Iterator[tuple[Tensor, Batch]]:
        """Yield the tokens of each sequence, and the sequence as a micro-batch."""
        for x_SD, seed_B in zip(x_TD.split(self.lengths), self._seeds().split(1), strict=True):
            yield x_SD, self._in_a_row(_ends_with_padding(len(x_SD)), seeds_B=seed_B)

    def _seeds(self) -> Tensor:
        return torch.arange(len(self.lengths)) + 1000 * self.seed

    def _in_a_row(self, mask_S: Tensor, **fields: Any) -> Batch:
        ids_BS = torch.zeros(1, len(mask_S), dtype=torch.int64)
        scale = torch.tensor(0.3)
        return Batch(ids_BS=ids_BS, labels_BS=ids_BS, mask_BS=mask_S.unsqueeze(0), loss_scale=scale, **fields)


def _ends_with_padding(length: int) -> Tensor:
    """Which tokens of a sequence are valid: not the last one, unless it is the only one."""
    return torch.arange(length) < max(1, length - 1)


TOKENS = st.builds(
    Tokens,
    sequences=st.integers(1, 3),
    positions=st.integers(0, 6),
    masked=st.integers(0, 3),
    seed=st.integers(0, 10**6),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
SEQUENCES = st.builds(Tokens, sequences=st.integers(2, 4), positions=st.integers(1, 6), seed=st.integers(0, 10**6))


def summed(routings: Sequence[Routing], kind: str = "stats") -> dict[str, Tensor]:
    """Statistics, or auxiliary losses, added up as the engine does: in fp64."""
    names = getattr(routings[0], kind)
    return {name: torch.stack([getattr(routing, kind)[name].double() for routing in routings]).sum(0) for name in names}


def of_sequences(batch: Batch, x_TD: Tensor, chosen: Sequence[int]) -> tuple[Tensor, Batch]:
    """Some sequences of a micro-batch as a micro-batch."""
    assert batch.seeds_B is not None, "a batch of the suite has seeds"
    x_BSD = x_TD.detach().view(*batch.ids_BS.shape, -1)
    part = Batch(
        ids_BS=batch.ids_BS[chosen],
        labels_BS=batch.labels_BS[chosen],
        mask_BS=None if batch.mask_BS is None else batch.mask_BS[chosen],
        seeds_B=batch.seeds_B[chosen],
        loss_scale=batch.loss_scale,
    )
    return x_BSD[chosen].flatten(0, 1), part


def shared_out(layer_case: LayerCase, tokens: Tokens) -> tuple[dict[str, Tensor], Routing]:
    """Results of a router for a micro-batch that all ranks share, and the routing of this rank's part of it.

    The former are, by name, tensors of all tokens in the order of the micro-batch: the same on every rank.
    """
    context, assembly = open_context(layer_case)
    router: Any = assembly.parts.routing.build(context)
    initialise(router, seed=0, std=lambda _: 0.3)
    cut = SequenceCut(context.layout)
    tp = TensorParallel(context.layout)
    whole = tokens.batch(loss_scale=torch.tensor(0.1))
    batch = replace(cut.part(whole), part=tp.shard(0), cp=cut.size)
    x_BSD = cut.own(tokens.x(layer_case.dim).detach().view(*whole.ids_BS.shape, -1))
    x_TD = batch.own(x_BSD.flatten(0, 1)).clone().requires_grad_()
    routing = router(x_TD, batch)
    (grad_TD,) = torch.autograd.grad(routing.weights_TK.square().sum(), x_TD)
    own = {"expert_ids_TK": routing.expert_ids_TK, "weights_TK": routing.weights_TK, "the tokens' gradient": grad_TD}
    joined = {name: cut.gather(tp.gather(part_TX).view(*x_BSD.shape[:2], -1)) for name, part_TX in own.items()}
    return {name: value.detach() for name, value in joined.items()}, detached(routing)


def detached(routing: Routing) -> Routing:
    """The fields of a routing that are compared, without a graph."""
    return Routing(
        expert_ids_TK=routing.expert_ids_TK,
        weights_TK=routing.weights_TK.detach(),
        stats={name: value.detach() for name, value in routing.stats.items()},
        aux_losses=routing.aux_losses,
    )


def compared(first: Routing, second: Routing) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the name and both values of each comparable tensor of two routings."""
    yield "expert_ids_TK", first.expert_ids_TK, second.expert_ids_TK
    yield "weights_TK", first.weights_TK, second.weights_TK
    for kind in ("stats", "aux_losses"):
        for name, value in getattr(first, kind).items():
            yield f"{kind}[{name!r}]", value, getattr(second, kind)[name]


def misshapen(routing: Routing, tokens: Tokens, dims: Mapping[str, int]) -> Iterator[str]:
    """Yield the faults that make a routing unusable for dispatchers."""
    ids_TK = routing.expert_ids_TK
    weights_TK = routing.weights_TK
    shape = (tokens.num_tokens, dims["top_k"])
    num_experts = dims["num_experts"]
    if tuple(ids_TK.shape) != shape or ids_TK.dtype != torch.int64:
        yield f"expert_ids_TK is {tuple(ids_TK.shape)} {ids_TK.dtype}; {shape} torch.int64 is right. {_cure(dims)}"
        return
    if tuple(weights_TK.shape) != shape or weights_TK.dtype != torch.float32:
        yield f"weights_TK is {tuple(weights_TK.shape)} {weights_TK.dtype}; {shape} torch.float32 is right."
        return
    if ids_TK.numel() and not -1 <= int(ids_TK.min()) <= int(ids_TK.max()) < num_experts:
        yield f"expert_ids_TK holds ids outside -1..{num_experts - 1}."
    if weights_TK[ids_TK < 0].any():
        yield "weights_TK is not zero where a choice is dropped."
    if not weights_TK.isfinite().all():
        yield "weights_TK is not finite."
    same_TKK = (ids_TK.unsqueeze(2) == ids_TK.unsqueeze(1)) & (ids_TK >= 0).unsqueeze(2)
    if same_TKK.tril(-1).any():  # below the diagonal: every choice is the same as itself
        yield "a token chooses the same expert twice."
    shape_TE = (tokens.num_tokens, num_experts)
    if routing.scores_TE is not None and tuple(routing.scores_TE.shape) != shape_TE:
        yield f"scores_TE is {tuple(routing.scores_TE.shape)}; {shape_TE} is right."
    for kind, values in (("stats", routing.stats), ("aux_losses", routing.aux_losses)):
        for name, value in values.items():
            if value.requires_grad:
                yield f"{kind}[{name!r}] carries a graph. Detach it: it is for metrics and sums."
            if kind == "aux_losses" and value.dim():
                yield f"aux_losses[{name!r}] is no scalar."
            if not value.isfinite().all():
                yield f"{kind}[{name!r}] is not finite."


def miscounted(routing: Routing, tokens: Tokens, dims: Mapping[str, int]) -> Iterator[str]:
    """Yield the faults in the counts of a routing."""
    num_experts = dims["num_experts"]
    ids_TK = routing.expert_ids_TK
    mask_T = tokens.batch().mask_T
    counts_E = routing.stats.get("tokens_per_expert")
    if counts_E is None or tuple(counts_E.shape) != (num_experts,) or counts_E.dtype != torch.float32:
        yield f"stats hold no tokens_per_expert ({num_experts}) in fp32."
        return
    kept_E = torch.bincount(ids_TK[ids_TK >= 0], minlength=num_experts)  # without choices that a capacity drops
    num_valid = tokens.num_tokens if mask_T is None else int(mask_T.sum())
    num_choices = num_valid * dims["top_k"]
    if (counts_E < kept_E).any() or counts_E.sum() != num_choices:
        yield (
            f"tokens_per_expert adds up to {counts_E.sum():g}; {num_valid} valid tokens make {num_choices} "
            f"choices, those that are dropped afterwards included and masked tokens left out. {_cure(dims)}"
        )
    if routing.counts_host is not None and list(routing.counts_host) != kept_E.tolist():
        yield f"counts_host is {routing.counts_host}; experts are chosen {kept_E.tolist()} times."
    if routing.num_rows is not None and routing.num_rows != kept_E.sum():
        yield f"num_rows is {routing.num_rows}; {int(kept_E.sum())} choices are not -1."
    if routing.capacity is not None and kept_E.max() > routing.capacity:
        yield f"an expert is chosen {int(kept_E.max())} times, above the capacity {routing.capacity}."


def ungrouped(ids_TK: Tensor, num_experts: int, count: int, most: int) -> Iterator[str]:
    """Yield the faults in the choices of tokens that use at most ``most`` of ``count`` equal groups of experts."""
    used_TG = torch.zeros(len(ids_TK), count + 1, dtype=torch.bool)
    used_TG.scatter_(1, ids_TK // (num_experts // count) + 1, value=True)  # -1, a dropped choice, is at 0
    used_TG = used_TG[:, 1:]
    tokens = f"none of {len(ids_TK)} tokens uses"
    largest = int(used_TG.sum(1).max())
    if largest > most:
        yield f"a token uses {largest} of {count} groups of experts, and {most} is the most."
    elif largest < min(most, ids_TK.shape[1]):
        yield f"{tokens} more than {largest} of {count} groups of experts, and {most} may be used."
    unused = (~used_TG.any(0)).nonzero().flatten().tolist()
    if unused:
        yield f"{tokens} the group {unused[0]} of {count}: the groups of a token are its best."


def _cure(dims: Mapping[str, int]) -> str:
    """What to do if a router is right with other sizes alone, as expert choice is that lets a token go to all."""
    return f"If the router needs other sizes than {dict(dims)}, set `dims` of the suite."
