"""A run resumes where it was, saves complete checkpoints or none, and generates text without a budget of rows."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from moefw.commands import specs
from moefw.core.errors import RunError
from moefw.core.stages import Batch
from moefw.training import feed, trainer
from moefw.training.generate import generate
from moefw.training.resume import Which
from moefw.training.world import Place


@pytest.fixture
def spec(write_spec: Callable[..., Path]) -> Path:
    return write_spec()


def train(spec: Path, *overrides: str, resume: Which | None) -> None:
    trainer.train(specs.read(str(spec), overrides), Place(0, 1, 0, 1), resume=resume)


def test_with_steps_of_another_size_a_run_goes_on_where_it_was_in_the_text(
    spec: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    seeds = feed.sequence_seeds

    def watched(seed: int, numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        seen.extend(numbers.tolist())
        return seeds(seed, numbers)

    monkeypatch.setattr(feed, "sequence_seeds", watched)
    for steps, tokens in ((2, 512), (4, 256), (5, 512)):
        train(spec, f"train.steps={steps}", f"train.tokens_per_step={tokens}", resume="last" if steps > 2 else None)
    assert seen == list(range(8 + 8 + 4 + 4 + 8))


def test_a_full_disk_is_told_and_leaves_earlier_checkpoints_alone(spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(spec, "train.steps=1", resume=None)

    def full(path: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", full)
        with pytest.raises(RunError, match=r"step-2 could not be saved: .*no space left"):
            train(spec, resume="last")
    checkpoints = spec.parent / "run" / "checkpoints"
    assert [path.name for path in checkpoints.iterdir()] == ["step-1"]
    train(spec, resume="last")
    assert {path.name for path in checkpoints.iterdir()} == {"step-1", "step-2"}


def test_text_is_written_without_a_budget_of_rows_in_ids_that_the_tokenizer_has() -> None:
    class Model(nn.Linear):
        def logits(self, batch: Batch) -> tuple[Tensor, None]:
            assert batch.dropless
            return torch.eye(256)[batch.ids_BS] + 2 * torch.eye(256)[200], None

    class Bytes:
        vocab_size = 99
        ends = frozenset[int]()
        encode, decode = staticmethod(lambda text: list(text.encode())), staticmethod(lambda ids: bytes(ids).decode())

    data: Any = Bytes()
    assert generate(Model(1, 1), data, data.encode("ab"), tokens=3, temperature=0, seed=0, window=8) == "abbbb"
    data.ends = frozenset({ord("b")})
    assert generate(Model(1, 1), data, data.encode("ab"), tokens=3, temperature=0, seed=0, window=8) == "abb"
