"""Dispatch cases, and the rows that must arrive, by brute force from the routing of all ranks.

Shapes: legend in :mod:`moefw.core.stages`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Final

import torch
from attrs import Factory, frozen
from torch import Tensor

from moefw.compose.spec.source import counted
from moefw.core.stages import Routing

SKEWS: Final = ("even", "one", "starved", "near", "far")
DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16}
Row = tuple[int, int, int]
"""The source rank, the token and the choice of a row."""


@frozen(kw_only=True)
class DispatchCase:
    """Tokens of every rank and their experts. The ranks are one expert group of ep x etp.

    ``skew`` "even": random; "one": every token chooses expert 0; "starved": none chooses the last expert; "near" and
    "far": tokens prefer the experts of their own rank, or of others. ``dropped`` is the share of choices that are -1.
    ``equal``: all ranks choose the same experts. ``padded``: each rank states a capacity. ``whole``: values are
    integers, whose sums are exact. ``ordered``: the dispatcher promises the order of an expert's rows.

    By default there are at least 8 experts, as many on each rank, and two ranks on each node, or all on one.
    """

    tokens: tuple[int, ...]
    etp: int = 1
    num_experts: int = Factory(lambda case: multiple(case.ep, of_at_least=8), takes_self=True)
    top_k: int = 2
    dim: int = 16
    ranks_per_node: int = Factory(lambda case: 2 if case.world % 2 == 0 else case.world, takes_self=True)
    skew: str = "even"
    dropped: float = 0.0
    row_alignment: int = 1
    dtype: str = "fp32"
    padded: bool = False
    equal: bool = False
    whole: bool = False
    ordered: bool = True
    seed: int = 0

    def __str__(self) -> str:
        """Describe the case."""
        words = [f"{counted(self.world, 'rank')} (ep {self.ep} x etp {self.etp})", f"tokens {self.tokens}"]
        words.append(f"{self.num_experts} experts, top-{self.top_k}, {self.skew} routing")
        if self.dropped:
            words.append(f"{self.dropped:.0%} of choices dropped")
        if self.row_alignment > 1:
            words.append(f"alignment {self.row_alignment}")
        if self.padded:
            words.append("a capacity")
        if self.dtype != "fp32":
            words.append(self.dtype)
        return ", ".join(words)

    @property
    def world(self) -> int:
        """The number of ranks."""
        return len(self.tokens)

    @property
    def ep(self) -> int:
        """The number of shares of the experts."""
        return self.world // self.etp

    @property
    def eps(self) -> float:
        """The relative rounding error of the tokens' dtype."""
        return torch.finfo(DTYPES[self.dtype]).eps

    def experts(self, rank: int) -> range:
        """Numbers of a rank's experts, of which it may hold only a part."""
        local_experts = self.num_experts // self.ep
        first = rank // self.etp * local_experts
        return range(first, first + local_experts)

    def part(self, rank: int) -> float:
        """Factor of a rank's part of its experts; the factors of all parts add up to 1."""
        return (2 * (rank % self.etp) + 1) / self.etp**2

    def x(self, rank: int) -> Tensor:
        """A rank's tokens, (T, D)."""
        return self._values(rank, "x")

    def probe(self, rank: int) -> Tensor:
        """Probe that a rank's output is multiplied with, (T, D)."""
        return self._values(rank, "probe")

    def _values(self, rank: int, what: str) -> Tensor:
        """Random values (T, D) for ``x`` or ``probe``, integers if ``whole``."""
        generator = _generator(self.seed, rank, 1 if what == "x" else 2)
        shape = (self.tokens[rank], self.dim)
        if self.whole:
            values = torch.randint(-3, 4, shape, generator=generator)
        else:
            values = torch.randn(shape, generator=generator)
        if what == "x" and self.seed % 4 == 3:
            values[1::5] = 0  # tokens may be zero, or equal
            values[3::7] = values[:1]
        return values.to(DTYPES[self.dtype])

    def ids(self, rank: int) -> Tensor:
        """A rank's choices, int64 (T, K): different experts for each token, -1 where dropped."""
        return _ids(self, rank).clone()

    def weights(self, rank: int) -> Tensor:
        """A rank's routing weights, fp32 (T, K): of either sign, and some 0 although the token is sent."""
        generator = _generator(self.seed, rank, 4)
        ids_TK = self.ids(rank)
        if self.whole:
            return (ids_TK >= 0).float()
        weights_TK = torch.rand(ids_TK.shape, generator=generator) * 3.0 - 1.0
        weights_TK[torch.rand(ids_TK.shape, generator=generator) < 0.15] = 0.0
        return weights_TK.masked_fill(ids_TK < 0, 0.0)

    def capacity(self, rank: int) -> int | None:
        """Capacity that a rank states, if any: at least its largest number of rows for one expert."""
        if not self.padded:
            return None
        return int(self.counts(rank).max()) + rank % 2

    def counts(self, rank: int) -> Tensor:
        """How often a rank chooses each expert, int64 (E)."""
        ids_TK = self.ids(rank)
        return torch.bincount(ids_TK[ids_TK >= 0], minlength=self.num_experts)

    def routing(self, rank: int, *, counts_host: bool = False, num_rows: bool = False) -> Routing:
        """A rank's routing as a router returns it, with what the host is to know."""
        return Routing(
            expert_ids_TK=self.ids(rank),
            weights_TK=self.weights(rank),
            capacity=self.capacity(rank),
            counts_host=tuple(self.counts(rank).tolist()) if counts_host else None,
            num_rows=int(self.counts(rank).sum()) if num_rows else None,
        )

    def arrivals(self, rank: int) -> list[list[Row]]:
        """Rows of each of a rank's experts, in order (source rank, token)."""
        return _arrivals(self, rank)

    def sizes(self, rank: int) -> tuple[int, ...]:
        """Sizes of a rank's groups, padding included."""
        capacity = sum(self.capacity(source) or 0 for source in range(self.world))
        sizes = [max(len(rows), capacity) for rows in self.arrivals(rank)]
        return tuple(multiple(self.row_alignment, of_at_least=size) for size in sizes)

    def own(self, rank: int) -> Tensor:
        """Which choices go to an expert of the rank itself, bool (T, K)."""
        ids_TK = self.ids(rank)
        return (ids_TK >= self.experts(rank).start) & (ids_TK < self.experts(rank).stop)

    def gains(self, rank: int) -> Tensor:
        """Factor of each choice's expert, fp64 (T, K); 0 where dropped."""
        return (self.ids(rank) + 1).double()


@lru_cache(1024)
def _ids(case: DispatchCase, rank: int) -> Tensor:
    """A rank's choices (T, K), shared by all callers: the best of scores, which the skew moves."""
    generator = _generator(case.seed, 0 if case.equal else rank, 3)
    scores = torch.rand(case.tokens[rank], case.num_experts, generator=generator)
    own = slice(case.experts(rank).start, case.experts(rank).stop)
    if case.skew == "one":
        scores[:, 0] += 2.0
    elif case.skew == "starved":
        scores[:, -1] -= 2.0
    elif case.skew == "near":
        scores[:, own] += 2.0
    elif case.skew == "far":
        scores[:, own] -= 2.0
    ids_TK = scores.topk(case.top_k, 1).indices
    return ids_TK.masked_fill(torch.rand(ids_TK.shape, generator=generator) < case.dropped, -1)


@lru_cache(1024)
def _arrivals(case: DispatchCase, rank: int) -> list[list[Row]]:
    chosen = [_ids(case, source) for source in range(case.world)]
    return [list(_rows_of(expert, chosen)) for expert in case.experts(rank)]


def _rows_of(expert: int, chosen: list[Tensor]) -> Iterator[Row]:
    """Yield the rows of an expert in order (source rank, token), from the choices of every rank."""
    for source, ids_TK in enumerate(chosen):
        for token, choice in (ids_TK == expert).nonzero().tolist():
            yield source, token, choice


def multiple(divisor: int, *, of_at_least: int) -> int:
    """Smallest multiple of a number that is not below a bound."""
    return -(-of_at_least // divisor) * divisor


def _generator(seed: int, rank: int, stream: int) -> torch.Generator:
    return torch.Generator().manual_seed((seed * 1009 + rank) * 10 + stream)


def unequal(world: int, seed: int = 0) -> tuple[int, ...]:
    """Different numbers of tokens for the ranks, one of them 0 where there are three or more."""
    if world == 1:
        return (7,)
    pattern = (5, 3, 0, 7, 2, 1, 4, 6)
    return tuple(pattern[(rank + seed) % len(pattern)] for rank in range(world))


def large(world: int, *, row_alignment: int) -> list[DispatchCase]:
    """Cases of the sizes that code for small ones may forget: most of a rank's tokens go to one expert of very many.

    The first has rows whose width no 64 divides, in groups padded to ``row_alignment``.
    """
    tokens = (2000, *(60 * rank for rank in range(1, world)))
    many_experts = multiple(world, of_at_least=64)
    return [
        DispatchCase(
            tokens=tokens, num_experts=many_experts, top_k=4, dim=300, skew="one", row_alignment=row_alignment, seed=12
        ),
        DispatchCase(
            tokens=tokens[::-1], num_experts=multiple(world, of_at_least=16), top_k=3, dim=320, dtype="bf16", seed=13
        ),
    ]


def usual(world: int) -> list[DispatchCase]:
    """Cases that every dispatcher is tested with, simplest first."""
    tokens = unequal(world)
    lonely = (0,) * (world - 1) + (1,)
    many_tokens = tuple(37 + 8 * rank for rank in range(world))
    many_experts = max(7, world) // world * world * 8
    cases = [
        DispatchCase(tokens=(3,) * world, top_k=1),
        DispatchCase(tokens=(4,) * world),
        *(DispatchCase(tokens=tokens, skew=skew, seed=seed) for seed, skew in enumerate(SKEWS)),
        DispatchCase(tokens=lonely),
        DispatchCase(tokens=(0,) * world),
        DispatchCase(tokens=tuple(reversed(tokens)), top_k=1, skew="one"),
        DispatchCase(tokens=tokens, top_k=8, seed=1),
        DispatchCase(tokens=tokens, dropped=0.4, top_k=3),
        DispatchCase(tokens=tokens, dropped=0.9),
        DispatchCase(tokens=tokens, dropped=1.0),
        DispatchCase(tokens=tokens, row_alignment=4, seed=2),
        DispatchCase(tokens=tokens, row_alignment=16, skew="starved", dropped=0.2),
        DispatchCase(tokens=(0,) * world, row_alignment=4),
        DispatchCase(tokens=tokens, dtype="bf16", top_k=3),
        DispatchCase(tokens=tokens, dtype="bf16", skew="one", row_alignment=4, dropped=0.2),
        DispatchCase(tokens=tokens, num_experts=world * 2, top_k=2, seed=3),
        DispatchCase(tokens=tokens, dim=7, seed=9),
        DispatchCase(tokens=tokens, num_experts=world, top_k=min(2, world), seed=10),
        DispatchCase(tokens=many_tokens, num_experts=many_experts, top_k=5),
    ]
    if world > 3:
        cases.append(DispatchCase(tokens=(0, 3, *(1,) * (world - 3), 0), top_k=3))
    nodes = sorted({1, world} - {cases[0].ranks_per_node})
    cases += [DispatchCase(tokens=tokens, ranks_per_node=size, dropped=0.2, top_k=3) for size in nodes]
    if world % 2 == 0:
        ep = world // 2
        cases += [
            DispatchCase(tokens=tokens, etp=2, seed=4),
            DispatchCase(tokens=lonely, etp=2),
            DispatchCase(tokens=tokens, etp=world),
            DispatchCase(tokens=tokens, etp=2, skew="one", dropped=0.3, row_alignment=4, dtype="bf16", top_k=3),
            DispatchCase(tokens=tokens, etp=2, skew="starved", ranks_per_node=1),
            DispatchCase(tokens=tokens, etp=2, num_experts=ep, top_k=min(2, ep), seed=6),
        ]
    return cases
