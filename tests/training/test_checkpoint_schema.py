"""Manifests and indexes are what ``docs/checkpoint.schema.json`` says, and it says no more than they are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from moefw.runtime.safetensors_dtypes import DTYPES
from moefw.testing.pool import RankPool
from moefw.training.checkpoint.manifest import FORMAT, Base, Manifest, Origin, SavedTensor
from resume_pairs import LAYOUTS, of_step, write

PATH = Path(__file__).parents[2] / "docs" / "checkpoint.schema.json"
SCHEMA: dict[str, Any] = json.loads(PATH.read_text())
INDEX = {"$ref": "#/$defs/index", "$defs": SCHEMA["$defs"]}
SPLIT = "tp x FSDP x ep"
BASE = Base(folder="weights", freeze=("embed.weight",), files=(("model.safetensors", 64 * "0"),))


def problems(content: Any, schema: dict[str, Any]) -> list[str]:
    return [error.message for error in Draft202012Validator(schema).iter_errors(content)]


@pytest.fixture(scope="module")
def folder(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that four ranks have written."""
    run = tmp_path_factory.mktemp("run")
    pool.run(write, LAYOUTS[SPLIT][0], SPLIT, run)
    return of_step(run)


def test_a_checkpoint_is_as_the_schema_says(folder: Path) -> None:
    Draft202012Validator.check_schema(SCHEMA)
    assert problems(json.loads((folder / "manifest.json").read_bytes()), SCHEMA) == []
    indexes = [json.loads(path.read_bytes()) for path in folder.glob("*.index.json")]
    assert len(indexes) == 4
    assert any(index["same"] for index in indexes)
    assert [problems(index, INDEX) for index in indexes] == [[]] * 4


def test_so_is_one_whose_frozen_weights_are_elsewhere() -> None:
    origin = Origin(world=2, plugins=(("moefw_gemms", "loop", "moefw", "0.1.0"),), tokenizer="bytes", base=BASE)
    tensors = {"model/norm.weight": SavedTensor("F32", (4,))}
    manifest = Manifest(step=3, origin=origin, tensors=tensors, files={"rank-00000.safetensors": 64 * "a"})
    assert problems(json.loads(manifest.sealed()), SCHEMA) == []


def without_one(content: Any) -> Iterator[tuple[str, Any]]:
    """Yield copies of a content that lack one key each, of any object but those whose keys are names."""
    for key, value in content.items():
        rest = {other: content[other] for other in content if other != key}
        yield key, rest
        if isinstance(value, dict) and key not in ("tensors", "files", "boxes", "same"):
            yield from ((f"{key}.{inner}", rest | {key: lacking}) for inner, lacking in without_one(value))


def test_the_schema_asks_for_every_key_and_for_no_other(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_bytes())
    index = json.loads(next(folder.glob("*.index.json")).read_bytes())
    for content, schema in ((manifest, SCHEMA), (index, INDEX)):
        assert problems(content | {"more": 1}, schema)
        assert [key for key, lacking in without_one(content) if not problems(lacking, schema)] == []
    lacking_of_a_part = [index | {"parts": [lacking]} for _, lacking in without_one(index["parts"][0])]
    assert all(problems(lacking, INDEX) for lacking in lacking_of_a_part)


def test_the_schema_has_the_format_and_the_dtypes_of_the_code() -> None:
    assert SCHEMA["properties"]["format"]["const"] == FORMAT
    assert set(SCHEMA["$defs"]["dtype"]["enum"]) == {*DTYPES}
