"""What training would refuse before it opens data is a problem of the spec, beside all others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moefw.compose.resolve import assemble
from moefw.core.errors import PlanError
from moefw.core.site import Machine
from spec_cases import DEFAULTS, REGISTRY, complaint, complaints

pytestmark = pytest.mark.usefixtures("empty_folder")

FEW = {"vocab_size": 64}
BYTES = "needs 256 token ids: bytes has them; decoder offers 64. Use model.vocab_size: 256."
DENSE = {"num_layers": 2, "num_dense_layers": 2}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bytes of text": ({"model": FEW}, f"data.tokenizer: text {BYTES}"),
    "bytes of rows": ({"model": FEW, "data": {"use": "jsonl", "path": "x"}}, f"data.tokenizer: jsonl {BYTES}"),
    "bytes of ids": (
        {"model": FEW, "data": {"use": "megatron", "path": "x", "tokenizer": "bytes"}},
        f"data.tokenizer: megatron {BYTES}",
    ),
    "bytes of a part": (
        {"model": FEW, "data": {"use": "blend", "parts": [{"use": "text", "path": "x", "tokenizer": "bytes"}]}},
        f"data.parts[0].tokenizer: text {BYTES}",
    ),
    "a vocabulary": (
        {"model": FEW, "data": {"tokenizer": "bpe-300"}},
        "data.tokenizer: text needs 300 token ids: bpe-300 has them; decoder offers 64. Use model.vocab_size: 300.",
    ),
    "routes of no layer": (
        {"model": DENSE, "train": {"record_routes": True}},
        "train.record_routes: no layer has experts, so there are no routes. Leave out",
    ),
    "routes that are not there": (
        {"model": DENSE, "train": {"replay_routes": "x"}},
        "train.replay_routes: no layer has experts, so there are no routes. Leave out",
    ),
    "its own routes": (
        {"train": {"record_routes": True, "replay_routes": "runs/../runs/a/routes"}, "run": {"dir": "runs/a"}},
        "train.record_routes: it would write over runs/a/routes, which is replayed. Use another run.dir.",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_training_refuses_is_told_without_opening_data(name: str) -> None:
    tree, what = REFUSED[name]
    assert what in complaint(json.dumps(tree), kind=PlanError)


def test_it_is_told_beside_other_problems() -> None:
    told = complaints(json.dumps({"model": FEW | DENSE | {"dim": "x"}, "train": {"record_routes": True, "lr": -1}}))
    assert [words for words in ("'x'", "token ids", "no layer has experts", "'lr'") if words in " ".join(told)] == [
        "'x'",
        "token ids",
        "no layer has experts",
        "'lr'",
    ]


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_is_only_built_or_exported_needs_none_of_it(name: str) -> None:
    Path("spec.yaml").write_text(json.dumps(REFUSED[name][0]))
    assemble(Path("spec.yaml"), defaults=DEFAULTS, registry=REGISTRY, machine=Machine())


def test_a_file_tells_itself_how_many_ids_it_has() -> None:
    Path("spec.yaml").write_text(json.dumps({"model": FEW, "data": {"tokenizer": "tokenizer.json"}}))
    assemble(Path("spec.yaml"), defaults=DEFAULTS, registry=REGISTRY, machine=Machine(), for_run=True)
