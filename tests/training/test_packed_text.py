"""A run on packs of documents resumes bit for bit, and on other ranks, with and without sharing, as the same run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import copies
from command_here import moefw_says
from data_cases import write
from resolved_specs import problems_of
from training_process import TIMED

LENGTHS = (3, 40, 9, 120, 17, 5, 64, 1, 30)


@pytest.fixture
def spec(write_spec: Callable[..., Path]) -> Path:
    """Documents of very unequal lengths, some longer than a sequence."""
    path = write_spec(tokens_per_step=256, steps=4, eval_every=2, checkpoint_every=2)
    corpus = {f"{n}.txt": f"{n} a fox jumps over it" * 9 for n in range(40)}
    texts = {name: text[: LENGTHS[n % 9]] for n, (name, text) in enumerate(corpus.items())}
    tree = json.loads(path.read_text())
    tree["data"] = {"use": "text", "path": str(write(path.parent / "corpus", texts)), "heldout": 0.2}
    tree["train"] |= {"packing": "dynamic", "micro_batch": 1}
    path.write_text(json.dumps(tree))
    return path


def records(spec: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (spec.parent / "run" / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in TIMED} for line in lines]


def trained(spec: Path, *arguments: str) -> list[dict[str, Any]]:
    moefw_says("train", spec, *arguments)
    return records(spec)


def test_packed_text_resumes_bit_for_bit_and_on_ranks_that_share_sequences(spec: Path) -> None:
    whole = trained(spec)
    assert trained(spec, "--resume=2") == whole
    evaluated = json.loads(moefw_says("eval", spec.parent / "run", "--json"))
    assert evaluated["eval_loss"] == pytest.approx(whole[-1]["eval_loss"], rel=1e-6)
    shared = copies.run("moefw", "train", spec, "--resume=2", "parallel={dense: {dp: 1, cp: 2}}")
    assert shared.returncode == 0, shared.stderr
    for one, wanted in zip(records(spec), whole, strict=True):
        assert one["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
        assert one.get("eval_loss", 0.0) == pytest.approx(wanted.get("eval_loss", 0.0), rel=1e-5)


@pytest.mark.parametrize(
    ("train", "told"),
    [
        (
            "packing: static, tokens_per_step: 8192, seq_len: 510, micro_batch: 1",
            "8192 tokens a step are not a whole number of the longest sequence, 510. Use for example "
            "tokens_per_step: 8160.",
        ),
        (
            "packing: dynamic, record_routes: true",
            "routes are recorded and replayed of sequences of one length, and packing makes others. "
            "Use packing: none, or leave out record_routes and replay_routes.",
        ),
        ("packing: full", "train.packing: 'full' is not one of the choices. Known: dynamic, none, static."),
    ],
)
def test_what_does_not_go_with_packs_is_told(train: str, told: str) -> None:
    assert any(told in problem for problem in problems_of(f"train: {{{train}}}"))


def test_packs_divide_among_the_ranks_that_share_them() -> None:
    text = "{train: {packing: static, tokens_per_step: 4056, seq_len: 12, micro_batch: 1}, parallel: {dense: {cp: 2, tp: 2}}}"
    (problem,) = problems_of(text)
    assert "a pack has room for micro_batch 1 x seq_len 12 tokens, which do not divide into 8 equal parts." in problem
