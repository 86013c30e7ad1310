"""A run that stops after any step, and goes on with other ranks, sees the samples that an unbroken run sees."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from fake_steps import fake_assembly
from moefw import Batch
from moefw.compose.build import Shared
from moefw.core.contracts import Layout, LayoutPlan
from moefw.testing.training import SMALL
from moefw.training.feed import feed_of
from moefw.training.session import Session

STEPS = 12
STOPS = range(1, 11)
WORLDS: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "one rank": (1, {}),
    "dp 2": (2, {"experts": {"ep": 2}}),
    "dp 2, cp 2": (4, {"dense": {"cp": 2}, "experts": {"ep": 4}}),
    "dp 4, tp 2": (8, {"dense": {"tp": 2}, "experts": {"ep": 2}}),
}
Sample = tuple[int, ...]


class _Rank(Layout):
    """The place of a rank in a layout plan. A feed meets no other rank."""

    def __init__(self, plan: LayoutPlan, rank: int) -> None:
        self.plan = plan
        self.rank = rank
        self.device = "cpu"
        self.ranks_per_node = plan.world

    def open(self, ranks: tuple[int, ...]) -> None:
        raise AssertionError("a feed opens no group")

    host_group = None  # type: ignore[assignment]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text("\n\n".join(f"{number} " * (1 + number * 7 % 40) for number in range(900)))
    return path


def samples(text: Path, packing: str, world: str, steps: range) -> list[set[Sample]]:
    """The sequences that all ranks of a world together read in each step, from a feed that begins there."""
    ranks, parallel = WORLDS[world]
    train = {**SMALL["train"], "seq_len": 32, "micro_batch": 2, "tokens_per_step": 512, "packing": packing}
    data = {"use": "text", "path": str(text), "tokenizer": "bytes", "heldout": 0.1}
    model = {**SMALL["model"], "vocab_size": 264}
    tree = {**SMALL, "model": model, "train": train, "data": data, "parallel": parallel}
    assembly = fake_assembly(tree, ranks)
    source = assembly.parts.data.prepare(text.parent / "cache")
    feeds = [
        feed_of(
            Session(
                assembly=assembly,
                device=torch.device("cpu"),
                layout=_Rank(assembly.layout, rank),
                data=source,
                model=torch.nn.Identity(),
                shared=Shared(),
            )
        )
        for rank in range(ranks)
    ]
    return [
        {sample for feed in feeds for batch in feed.micro_batches(step) for sample in samples_in(batch)}
        for step in steps
    ]


def samples_in(batch: Batch) -> list[Sample]:
    """The sequences of a batch, one after another in its rows, without what fills them up."""
    found = []
    for row, ids_S in enumerate(batch.ids_BS):
        sequences = ids_S.split(list(batch.lengths)) if batch.lengths else [ids_S]
        masks = [torch.ones_like(ids, dtype=torch.bool) for ids in sequences]
        if batch.mask_BS is not None:
            masks = list(batch.mask_BS[row].split([len(ids) for ids in sequences]))
        found += [tuple(ids[mask].tolist()) for ids, mask in zip(sequences, masks, strict=True) if mask.any()]
    return found


@pytest.mark.parametrize("packing", ["none", "static", "dynamic"])
def test_a_run_goes_on_with_the_samples_of_an_unbroken_one(text: Path, packing: str) -> None:
    unbroken = samples(text, packing, "one rank", range(STEPS))
    assert len({sample for step in unbroken for sample in step}) > 4 * STEPS
    for stop, (before, after) in zip(STOPS, itertools.cycle(itertools.permutations(WORLDS, 2)), strict=False):
        assert samples(text, packing, before, range(stop)) == unbroken[:stop], before
        assert samples(text, packing, after, range(stop, STEPS)) == unbroken[stop:], after
