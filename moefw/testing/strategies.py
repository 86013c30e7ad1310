"""Hypothesis strategies: cases for a dispatcher and for whole layers, and spec trees over installed plugins."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import strategies as st

from moefw.compose.spec.source import Tree
from moefw.testing.layer_case import LayerCase
from moefw.testing.suites.dispatch_case import DTYPES, SKEWS, DispatchCase
from moefw.testing.suites.dispatch_layer import Layer


def tokens(world: int, *, most: int = 9) -> st.SearchStrategy[tuple[int, ...]]:
    """Draw each rank's number of tokens: unequal, equal, zero, or one token in the whole world."""
    unequal = st.tuples(*[st.integers(0, most)] * world)
    same = st.integers(0, most).map(lambda each: (each,) * world)
    lonely = st.integers(0, world - 1).map(lambda rank: tuple(int(other == rank) for other in range(world)))
    return st.one_of(unequal, same, lonely)


def meshes(world: int) -> st.SearchStrategy[dict[str, int]]:
    """Draw ep and etp of a world; edp copies fill the rest."""
    divisors = [size for size in range(1, world + 1) if world % size == 0]
    pairs = [(ep, etp) for ep, etp in itertools.product(divisors, repeat=2) if world % (ep * etp) == 0 and etp <= 2]
    return st.sampled_from([{"ep": ep, "etp": etp} for ep, etp in pairs])


def sizes(shares: int, *, most_experts: int = 16) -> st.SearchStrategy[tuple[int, int]]:
    """Draw a number of experts that ``shares`` divides, and a top-k: 1, some, or all."""
    most_local_experts = max(1, most_experts // shares)
    least_experts = max(2, shares)
    num_experts = st.integers(1, most_local_experts).map(lambda local: max(local * shares, least_experts))

    def with_top_k(experts: int) -> st.SearchStrategy[tuple[int, int]]:
        top_k = st.one_of(st.just(1), st.integers(1, min(experts, 6)), st.just(experts))
        return st.tuples(st.just(experts), top_k)

    return num_experts.flatmap(with_top_k)


@st.composite
def cases(draw: st.DrawFn, world: int) -> DispatchCase:
    """Draw a dispatch case whose expert group is the whole world."""
    etp = draw(st.sampled_from([size for size in (1, 1, 2) if world % size == 0]))
    num_experts, top_k = draw(sizes(world // etp))
    return DispatchCase(
        tokens=draw(tokens(world)),
        num_experts=num_experts,
        top_k=top_k,
        dim=draw(st.sampled_from((16, 16, 7, 64))),
        etp=etp,
        ranks_per_node=draw(st.sampled_from([size for size in (1, 2, 3, 4) if world % size == 0])),
        skew=draw(st.sampled_from(SKEWS)),
        dropped=draw(st.sampled_from((0.0, 0.0, 0.3, 1.0))),
        row_alignment=draw(st.sampled_from((1, 1, 2, 8, 16))),
        dtype=draw(st.sampled_from(sorted(DTYPES))),
        padded=False,
        seed=draw(st.integers(0, 1000)),
    )


@st.composite
def layers(draw: st.DrawFn, world: int) -> Layer:
    """Draw a whole MoE layer of a world. Layouts may replicate experts."""
    mesh = draw(meshes(world))
    num_experts, top_k = draw(sizes(mesh["ep"], most_experts=8))
    num_experts = max(2, num_experts)
    capacity = draw(st.sampled_from((None, None, (0.7, "probs"), (1.0, "position"))))
    return Layer(
        tokens=draw(tokens(world)),
        experts=tuple((axis, size) for axis, size in mesh.items() if size > 1),
        num_experts=num_experts,
        top_k=top_k,
        skew=draw(st.sampled_from(("even", "one", "starved"))),
        masked=draw(st.booleans()),
        precision=draw(st.sampled_from(("fp32", "fp32", "bf16"))),
        capacity=capacity,
        pad=capacity is not None and draw(st.booleans()),
        row_alignment=draw(st.sampled_from((1, 1, 4, 16))),
        seed=draw(st.integers(0, 1000)),
    )


def layer_cases(world: int, *, parts: Mapping[str, Any] | None = None) -> st.SearchStrategy[LayerCase]:
    """Draw a layer case of a world; ``parts`` override drawn sections. It may be refused."""

    def layer_case(layer: Layer) -> LayerCase:
        return LayerCase(
            tokens=layer.tokens,
            num_experts=layer.num_experts,
            top_k=layer.top_k,
            skew=layer.skew,
            masked=layer.masked,
            row_alignment=layer.row_alignment,
            seed=layer.seed,
            parts={**layer.parts(), **(parts or {})},
        )

    return layers(world).map(layer_case)


def specs(world: int, choices: Mapping[str, Sequence[Mapping[str, Any]]]) -> st.SearchStrategy[Tree]:
    """Draw a whole spec as plain data.

    ``choices[section]`` lists the values of a section, for example ``{"dispatch": [{"use": "alltoall"}]}``. Other
    sections are drawn as in :func:`layer_cases`, or left to the defaults. It may be refused.
    """
    chosen = st.fixed_dictionaries({section: st.sampled_from(list(options)) for section, options in choices.items()})
    return st.builds(lambda layer_case, parts: {**layer_case.tree(), **parts}, layer_cases(world), chosen)
