"""The shape of Qwen3-235B-A22B on hundreds of ranks: the memory of each rank against plain arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist
from torch._subclasses.fake_tensor import DataDependentOutputException

from fake_steps import FakeStep, fake_assembly, fake_step
from moefw.recording.fake_tensors import fake_world
from pairwise import deep
from python_lines import at_most

SEQ_LEN = 4096
QWEN3_235B = 235_093_634_560
QWEN3_235B_LAYER = 2_487_755_008
"""The parameters of Qwen3-235B-A22B, as its checkpoint counts them, and of one of its 94 layers."""


class Sizes(NamedTuple):
    """A layout in numbers. ``shard``: the number of a parameter's copies over which it is sharded."""

    world: int
    tp: int
    ep: int
    shard: int
    expert_shard: int
    etp: int = 1
    layers: int = 94

    @property
    def dp(self) -> int:
        return self.world // self.tp

    @property
    def edp(self) -> int:
        return self.world // (self.ep * self.etp)

    def tree(self) -> dict[str, Any]:
        return {
            "model": {"preset": "qwen3-235b-a22b", "num_layers": self.layers},
            "routing": {"use": "forced"},
            "precision": {"use": "bf16"},
            "parallel": {
                "use": "folded",
                "dense": {"tp": self.tp, "shard": "all" if self.shard == self.dp else self.shard},
                "experts": {
                    "ep": self.ep,
                    "etp": self.etp,
                    "shard": "all" if self.expert_shard == self.edp else self.expert_shard,
                },
            },
            "train": {"micro_batch": 1, "seq_len": SEQ_LEN, "tokens_per_step": SEQ_LEN * self.dp},
            "run": {"device": "cpu"},
        }


class Held(NamedTuple):
    """Tensors of one shape that a rank would hold without FSDP."""

    kind: str
    shape: tuple[int, ...]
    times: int


def without_fsdp(sizes: Sizes) -> Iterator[Held]:
    """Yield the parameters of one rank: D 4096, 64 heads and 4 key-value heads of 128, 128 experts of width 1536."""
    tp, ep, layers, width = sizes.tp, sizes.ep, sizes.layers, 1536 // sizes.etp
    kv_parts = tp if 4 % tp == 0 else 1
    vocabulary, queries, keys_and_values = 151936 // tp, 64 * 128 // tp, 4 * 128 // kv_parts
    yield Held("split" if tp > 1 else "copied", (vocabulary, 4096), 2)
    yield Held("split" if tp > 1 else "copied", (queries, 4096), layers)
    yield Held("split" if tp > 1 else "copied", (4096, queries), layers)
    yield Held("split" if kv_parts > 1 else "copied", (keys_and_values, 4096), 2 * layers)
    yield Held("copied", (128,), 2 * layers)
    yield Held("copied", (4096,), 2 * layers + 1)
    yield Held("copied", (128, 4096), layers)
    yield Held("experts", (128 // ep, 2 * width, 4096), layers)
    yield Held("experts", (128 // ep, 4096, width), layers)


def shard_of(shape: tuple[int, ...], index: int, count: int) -> int:
    """Return the elements of part ``index`` of ``count`` along the first dimension that ``count`` divides.

    If there is none, the first dimension is cut into pieces of its ``count``-th part, rounded up. The last ranks
    then have less, or nothing.
    """
    if any(size % count == 0 for size in shape):
        return math.prod(shape) // count
    each = -(-shape[0] // count)
    return min(each, max(0, shape[0] - index * each)) * math.prod(shape[1:])


def held_by(sizes: Sizes, rank: int) -> dict[str, int]:
    """Return the elements that a rank holds, by kind. Adjacent ranks differ in tp, or in etp and then ep."""
    dense, experts = rank // sizes.tp % sizes.shard, rank // (sizes.ep * sizes.etp) % sizes.expert_shard
    held = {"copied": 0, "split": 0, "experts": 0}
    for kind, shape, times in without_fsdp(sizes):
        index, count = (experts, sizes.expert_shard) if kind == "experts" else (dense, sizes.shard)
        held[kind] += times * shard_of(shape, index, count)
    return held


def roles(sizes: Sizes) -> dict[tuple[tuple[str, int], ...], list[int]]:
    """Return the ranks by role; ranks of one role hold the same number of elements."""
    found: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for rank in range(sizes.world):
        found.setdefault(tuple(held_by(sizes, rank).items()), []).append(rank)
    return found


def run_roles(sizes: Sizes) -> dict[int, tuple[int, FakeStep]]:
    """Build the last rank of each role; return, by rank, the number of ranks with its role, and its step."""
    return {ranks[-1]: (len(ranks), fake_step(sizes.tree(), ranks[-1], sizes.world)) for ranks in roles(sizes).values()}


def parameters_of_the_model(sizes: Sizes, steps: Mapping[int, tuple[int, FakeStep]]) -> int:
    """Return the number of parameters that all ranks hold together, counted once."""
    copies = {
        "copied": sizes.tp * sizes.dp // sizes.shard,
        "split": sizes.dp // sizes.shard,
        "experts": sizes.edp // sizes.expert_shard,
    }
    held = dict.fromkeys(copies, 0)
    for ranks, step in steps.values():
        for kind, elements in step.elements.items():
            held[kind] += ranks * elements
    assert all(held[kind] % copies[kind] == 0 for kind in copies)
    return sum(held[kind] // copies[kind] for kind in copies)


FULL = [
    Sizes(world=256, tp=4, ep=32, shard=64, expert_shard=8),
    Sizes(world=1024, tp=4, ep=64, shard=32, expert_shard=16),
]
"""All layers: sharded over all copies, and over 32 of the 256 copies of dense parameters."""
SHALLOW = [
    Sizes(world=1024, tp=4, ep=32, etp=2, shard=256, expert_shard=16, layers=2),
    Sizes(world=1024, tp=8, ep=64, etp=2, shard=128, expert_shard=4, layers=2),
    Sizes(world=256, tp=1, ep=128, shard=1, expert_shard=2, layers=1),
]
"""Uneven shards (of 128 norm weights over 256 ranks), more ranks than key-value heads, parts of experts, whole copies."""


def name(sizes: Sizes) -> str:
    return f"{sizes.world}-tp{sizes.tp}-ep{sizes.ep}-etp{sizes.etp}-{sizes.layers}layers"


@pytest.mark.parametrize(
    "sizes",
    [
        *deep(*FULL, FULL[1]._replace(layers=3), SHALLOW[1]),
        *(FULL[0]._replace(layers=3), SHALLOW[0], SHALLOW[2]),
    ],
    ids=name,
)
def test_a_rank_of_each_role_holds_its_part_and_trains_it(sizes: Sizes) -> None:
    steps = run_roles(sizes)
    for rank, (_, step) in steps.items():
        assert step.elements == held_by(sizes, rank)
        assert step.without_gradient == ()
    left_out = (94 - sizes.layers) * QWEN3_235B_LAYER
    assert parameters_of_the_model(sizes, steps) == QWEN3_235B - left_out


def test_ranks_differ_where_a_shard_is_uneven_and_nowhere_else() -> None:
    assert [len(roles(sizes)) for sizes in FULL] == [1, 1]
    uneven = SHALLOW[0]
    first, last = roles(uneven).values()
    assert (first, last) == (list(range(512)), list(range(512, 1024)))


def test_4096_ranks_are_resolved_in_a_million_lines_of_python() -> None:
    sizes = Sizes(world=4096, tp=8, ep=64, shard=512, expert_shard=64)
    with at_most(lines=1_000_000):
        assembly = fake_assembly(sizes.tree(), sizes.world)
    assert assembly.layout.sizes == {"pp": 1, "dp": 512, "cp": 1, "tp": 8, "edp": 64, "ep": 64, "etp": 1}
    assert len(assembly.layout.copies(4095, "dense")[0]) == 512
    assert len(assembly.layout.copies(4095, "experts")[0]) == 64


def test_a_fake_world_is_one_rank_and_gone_however_it_ends() -> None:
    with fake_world(3, 8):
        assert (dist.get_rank(), dist.get_world_size()) == (3, 8)
    with pytest.raises(KeyError), fake_world(3, 8):
        raise KeyError
    assert not dist.is_initialized()


def test_what_reads_a_tensor_on_the_host_fails_in_a_fake_world() -> None:
    sizes = Sizes(world=256, tp=1, ep=128, shard=1, expert_shard=2, layers=1)
    with pytest.raises(DataDependentOutputException):
        fake_step(sizes.tree() | {"routing": {"use": "topk"}}, 0, sizes.world)
    assert not dist.is_initialized()
