"""Overrides of the command line are read like the file, and their errors are located there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moefw.compose.spec.source import dotted, key_path, read_spec_file
from moefw.core.errors import SpecError
from spec_cases import GOOD, assembled, complaint

pytestmark = pytest.mark.usefixtures("empty_folder")


class TestOverrides:
    @pytest.mark.parametrize(
        ("override", "value"),
        [
            ("train.steps=20", 20),
            ("train.lr=1e-3", 1e-3),
            ("run.dir=no", "no"),
            ("run.dir=2024-01-01", "2024-01-01"),
            ("run.dir='8'", "8"),
            ("run.dir=a=b", "a=b"),
            ("train.clip_norm=null", None),
            ("train.clip_norm=", None),
            ("model.num_experts=0x10", 16),
            ("model.zero_init=false", False),
            ("parallel.experts.ep=4", 4),
            ("memory=[]", []),
            ("memory.0.regions=[router]", ["router"]),
            ("memory[0].regions=[router]", ["router"]),
            ("memory.1.regions.0=router", "router"),
            ("train.optimizer={use: adamw, beta1: 0.5}", {"use": "adamw", "beta1": 0.5}),
            ("train.optimizer.beta1=0.5", 0.5),
        ],
    )
    def test_are_read_as_yaml(self, override: str, value: object) -> None:
        Path("spec.yaml").write_text(GOOD)
        tree: Any
        tree, marks = read_spec_file(Path("spec.yaml"), [override], problems := [])
        path = key_path(override.partition("=")[0])
        for key in path:
            tree = tree[key]
        assert problems == []
        assert (tree, type(tree)) == (value, type(value))
        assert marks.where(path) == f"command line, {override!r} {dotted(path)}"

    def test_reach_the_assembly_and_the_last_one_wins(self) -> None:
        found = assembled(GOOD, "train.steps=7", "memory.0.regions=[router]", "train.steps=9", "model.preset=null")
        assert found.spec.train.steps == 9
        assert found.parts.memory[0].regions == ("router",)
        assert found.parts.model.num_experts == 8
        assert assembled(GOOD, "memory=[]").parts.memory == ()

    def test_make_missing_sections_and_fill_empty_ones(self) -> None:
        assert assembled("train:", "train.optimizer.beta1=0.5", "data.heldout=0.1").parts.optimizer.beta1 == 0.5

    @pytest.mark.parametrize(
        ("override", "where", "what"),
        [
            ("train.steps=x", "train.steps", "'x' is not a whole number"),
            ("trian.steps=3", "trian", "Did you mean 'train'?"),
            ("memory=[{use: keep, regoins: [a]}]", "memory[0].regoins", "Did you mean 'regions'?"),
            ("memory.0.regions=[attention, 4]", "memory[0].regions[1]", "4 is not plain text"),
            ("memory.1=3", "memory[1]", "3 is not a mapping"),
            ("train={steps: {a: 1}}", "train.steps", "{'a': 1} is not a whole number"),
            ("run.dir=a: b", "run.dir", "{'a': 'b'} is not plain text"),
            ("memory.7.use=keep", "memory", "has 2 items and none at '7'"),
            ("memory.²=keep", "memory", "none at '²'"),
            ("train.steps.x=3", "train.steps", "neither a section nor a list"),
            ("train.steps", "", "is written key.path=value"),
            ("=3", "", "is written key.path=value"),
            ("train..steps=3", "", "is written key.path=value"),
            ("", "", "is written key.path=value"),
            ("train.steps=[1", "", "this is not YAML"),
            ("train.steps=1\n--- \n2", "train.steps", "a second document starts here"),
            ("train.steps=*a", "train.steps", "aliases are not allowed"),
            ("train.steps=!!int 3", "train.steps", "tags, anchors and aliases"),
            ("train.steps=99999999999999999999", "train.steps", "does not fit into 64 bits"),
            ("train.steps=" + "[" * 100_000, "train", "nested deeper than 20 levels"),
            ("train.\udcff=1", "train.'\\udcff'", "is not an option here"),
            ("run.dir=\udcff", "", "this is not YAML"),
        ],
    )
    def test_that_are_wrong_are_told_once_with_their_text(self, override: str, where: str, what: str) -> None:
        with pytest.raises(SpecError) as caught:
            assembled(GOOD, override)
        (problem,) = caught.value.problems
        shown = repr(override) if len(override) < 200 else repr(override)[:197] + "..."
        assert problem.where == f"command line, {shown} {where}".rstrip()
        assert what in str(problem)

    def test_of_a_plugin_alone_tell_how_to_drop_the_options_of_another(self) -> None:
        spec = GOOD + "adapter: {use: lora, rank: 8, alpha: 16}\n"
        with pytest.raises(SpecError) as caught:
            assembled(spec, "adapter.use=none")
        fix = (
            "An override of 'use' alone keeps the other options of the file: write 'adapter={use: none}' to drop them."
        )
        assert [problem.fix for problem in caught.value.problems] == [fix, fix]
        assert "adapter.rank: 'rank' is not an option of 'none'." in str(caught.value)

    def test_of_a_use_where_no_plugin_is_chosen_are_told_as_any_other(self) -> None:
        with pytest.raises(SpecError, match="'nonsense' is not an option here"):
            assembled(GOOD.replace("seed: 3", "nonsense: 3"), "run.use=x")

    def test_drop_the_places_of_what_they_replace(self) -> None:
        override = "routing={use: topk, balance: [{kind: aux_loss, coeff: x}]}"
        assert complaint(GOOD, override).startswith(f"command line, {override!r} routing.balance[0].coeff: 'x'")
