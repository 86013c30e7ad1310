"""What a user writes is read exactly, and what is wrong with it is said at its place, all of it, once."""

from __future__ import annotations

import copy
import json
import math
import os
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from io import StringIO
from pathlib import Path
from typing import Any, Literal

import pytest
from attrs import field, frozen
from attrs.validators import ge, max_len
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from moefw.commands import specs
from moefw.commands.check import check
from moefw.core.assembly import Assembly
from moefw.core.errors import MoefwError, PluginError, Problem, SpecError
from moefw.core.registry import Registry
from moefw.core.resolve import assemble
from moefw.core.site import Machine
from moefw.core.spec.sections import with_defaults
from moefw.core.spec.source import MAX_BYTES, UNREAD, Marks, dotted, key_path, read_spec_file, read_yaml, scalar
from moefw.core.spec.structure import plain, structure

REGISTRY = Registry()
DEFAULTS = specs.defaults()

GOOD = """\
# every section, in the ways in which people write them
model:
  preset: qwen3-moe-tiny
  num_experts: 8
  num_layers: 2
routing: {use: topk, score: sigmoid, balance: [{kind: expert_bias, rate: 0.001}]}
gemm: {use: loop}
memory:
  - {use: recompute, regions: [attention, moe_act]}
  - use: keep
    regions: [layer]
parallel: {pp: 1, dense: {cp: 1}, experts: {ep: 2}}
data: {path: null}
train:
  steps: 20
  lr: 1e-3
  schedule: {use: wsd, decay_share: 0.5}
run: {dir: "runs/good", seed: 3}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("specs"))


def assembled(text: str | bytes, *overrides: str) -> Assembly:
    """What a ``spec.yaml`` with that text, and the overrides, resolve to."""
    Path("spec.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    return assemble(Path("spec.yaml"), overrides, defaults=DEFAULTS, registry=REGISTRY, machine=Machine())


def complaints(text: str | bytes, *overrides: str, kind: type[MoefwError] = SpecError) -> list[str]:
    """What is wrong with it, as it is printed."""
    with pytest.raises(MoefwError) as caught:
        assembled(text, *overrides)
    assert type(caught.value) is kind
    return [str(problem) for problem in caught.value.problems]


def complaint(text: str | bytes, *overrides: str, kind: type[MoefwError] = SpecError) -> str:
    (only,) = complaints(text, *overrides, kind=kind)
    return only


class TestFiveMistakes:
    TEXT = """\
model:
  num_experts: 15
  num_layers: 2
routing: {use: topk, blance: []}
dispatch: {use: all2all}
gemm: {use: grouped}
memory: [{use: keep, regions: [moe_act]}]
parallel: {experts: {ep: 2}}
train:
  steps: 2.7
"""
    MESSAGES = (
        "spec.yaml:10:3 train.steps: 2.7 is not a whole number. Write for example 8.",
        "spec.yaml:4:22 routing.blance: 'blance' is not an option here. Did you mean 'balance'?",
        "spec.yaml:5:12 dispatch.use: no plugin is called 'all2all'. Did you mean 'alltoall'?",
        "spec.yaml:6:1 gemm: grouped needs a size of axis ep that divides 15: each rank holds an equal share of 15"
        " experts; the layout offers ep=2. Use an ep that divides model.num_experts.",
        "spec.yaml:7:22 memory[0].regions: keep needs region moe_act to allow keep: a policy can only treat a region"
        " that is there and allows it; grouped offers moe_act=recompute. Change keep or grouped.",
    )

    def test_all_are_told_in_one_run_of_less_than_a_second(self) -> None:
        Path("spec.yaml").write_text(self.TEXT)
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        done = subprocess.run([sys.executable, "-m", "moefw", "check", "spec.yaml"], capture_output=True, text=True)
        assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 1.0
        assert done.returncode == 2
        assert done.stdout == ""
        assert done.stderr.splitlines() == [f"error: {message}" for message in self.MESSAGES]

    def test_json_says_the_same(self) -> None:
        Path("spec.yaml").write_text(self.TEXT)
        result = CliRunner().invoke(check, ["spec.yaml", "--json"], standalone_mode=False)
        assert result.return_value == 2
        found = json.loads(result.stdout)
        assert found["ok"] is False
        assert tuple(str(Problem(**problem)) for problem in found["problems"]) == self.MESSAGES

    def test_a_sound_spec_says_what_was_laid_out(self) -> None:
        for name in ("spec.yaml", os.fsdecode(b"\xff.yaml")):
            Path(name).write_text(GOOD)
            result = CliRunner().invoke(check, [name, "--world", "4"], standalone_mode=False, catch_exceptions=False)
            assert result.return_value == 0
            assert "is sound: 4 ranks (pp=1 dp=4 cp=1 tp=1 edp=2 ep=2 etp=1), 2 MoE layers" in result.stdout
            assert "routing: topk  dispatch: alltoall  gemm: loop  precision: fp32" in result.stdout
            result = CliRunner().invoke(check, [name, "--json"], standalone_mode=False, catch_exceptions=False)
            found = json.loads(result.stdout)
            assert (found["ok"], found["problems"], found["world"]) == (True, [], 2)
            assert found["resolved"]["model"]["num_experts"] == 8

    @pytest.mark.parametrize("kept", range(5))
    def test_each_alone_is_one_message(self, kept: int) -> None:
        mends = [
            ("2.7", "2"),
            ("blance", "balance"),
            ("all2all", "alltoall"),
            ("15", "16"),
            ("use: keep", "use: recompute"),
        ]
        text = self.TEXT
        for index, (wrong, right) in enumerate(mends):
            text = text if index == kept else text.replace(wrong, right)
        with pytest.raises(MoefwError) as caught:
            assembled(text)
        assert [str(problem) for problem in caught.value.problems] == [self.MESSAGES[kept]]

    def test_none_left_is_sound(self) -> None:
        assert assembled(GOOD).layout.world == 2


class TestNoFollowOnNoise:
    """A mistake is told once: nothing is concluded from what could not be read."""

    @pytest.mark.parametrize(
        ("wrong", "told"),
        [
            ("{model: {num_experts: many}, parallel: {experts: {ep: 3}}}", "'many' is not a whole number"),
            ("{model: {top_k: many, num_experts: 2}}", "'many' is not a whole number"),
            ("{model: {num_expert: 9}, parallel: {experts: {ep: 3}}}", "Did you mean 'num_experts'?"),
            ("{modle: {num_experts: 9}, parallel: {experts: {ep: 3}}}", "Did you mean 'model'?"),
            ("{model: {preset: qwen3-moe-tny}, parallel: {experts: {ep: 64}}}", "Did you mean 'qwen3-moe-tiny'?"),
            ("{model: {use: decodr}, memory: [{use: keep, regions: [attention]}]}", "Did you mean 'decoder'?"),
            ("{routing: {score: sigmiod, balance: [{kind: expert_bias}]}}", "Did you mean 'sigmoid'?"),
            ("{gemm: {use: lop}, memory: [{use: keep, regions: [moe_act]}]}", "Did you mean 'loop'?"),
            ("{dispatch: {use: 3}, gemm: {use: loop}}", "3 is not the name of a plugin"),
            ("{dispatch: alltoall, gemm: {use: loop}}", "Write {use: alltoall}."),
            ("{memory: [{use: keep, regoins: [moe_act]}]}", "Did you mean 'regions'?"),
            ("{memory: [{use: keep, regions: [moe_act, 3]}]}", "3 is not plain text"),
            ("{parallel: {experts: {ep: -4}}}", "'ep' must be >= 1: -4."),
            ("{parallel: {experts: 4}}", "4 is not a mapping of options"),
            ("{parallel: {use: fold}}", "Did you mean 'folded'?"),
            ("{train: {micro_batch: x, tokens_per_step: 3}}", "'x' is not a whole number"),
            ("{train: 5}", "5 is not a mapping of options"),
            ("{trian: {micro_batch: 3}}", "Did you mean 'train'?"),
            ("{run: [1]}", "[1] is not a mapping of options"),
            ("{run: {device: gpu}}", "'gpu' is not one of the choices."),
            ("{memory: 3}", "3 is not a list"),
            ("{train: {micro_batch: 4, micro_batch: 3}}", "'micro_batch' stands here twice"),
            ("{train: {micro_batch: !x 3}}", "tags, anchors and aliases"),
            ("{dispatch: {use: !x alltoall}}", "tags, anchors and aliases"),
            ("{model: {preset: !x 3}}", "tags, anchors and aliases"),
        ],
    )
    def test_of(self, wrong: str, told: str) -> None:
        with pytest.raises(MoefwError) as caught:
            assembled(wrong, "train.tokens_per_step=393216" if "train" not in wrong else "run.seed=1")
        (problem,) = caught.value.problems
        assert told in str(problem)
        assert problem.where.startswith("spec.yaml:1:")

    def test_the_rest_is_checked_all_the_same(self) -> None:
        text = "{model: {top_k: many, num_experts: 15, head_dim: 3}, parallel: {experts: {ep: 2}}, gemm: {use: loop}}"
        first, *others = complaints(text, "memory=[{use: keep, regions: [nowhere]}]", "train.tokens_per_step=1000")
        assert "'many' is not a whole number" in first
        assert len(others) == 4
        assert "head_dim 3 is odd" in others[0]
        assert "region nowhere" in others[1] or "region nowhere" in others[2]
        assert "1000 tokens a step do not divide" in others[3]

    @pytest.mark.parametrize(
        ("text", "told"),
        [
            (
                "{memory: [{use: keep, regions: [3]}], model: {num_experts: 15}, parallel: {experts: {ep: 2}}}",
                "3 is not",
            ),
            (
                "{model: {num_experts: 15, num_expert: 3}, parallel: {experts: {ep: 2}}}",
                "'num_expert' is not an option",
            ),
            ("{dispatch: {use: nope}, model: {num_experts: 15}, parallel: {experts: {ep: 2}}}", "'nope'"),
            (
                "{train: {steps: [!x 3]}, model: {num_experts: 15}, parallel: {experts: {ep: 2}}}",
                "is not a whole number",
            ),
        ],
    )
    def test_a_misfit_elsewhere_is_told_beside_it(self, text: str, told: str) -> None:
        with pytest.raises(MoefwError) as caught:
            assembled(text)
        messages = [str(problem) for problem in caught.value.problems]
        assert any(told in message for message in messages)
        assert "needs a size of axis ep that divides 15" in messages[-1]
        assert len(messages) == 2 + ("!x" in text)


class TestPlaces:
    @pytest.mark.parametrize(
        ("text", "where"),
        [
            ("model:\n  dim: x\n", "spec.yaml:2:3 model.dim"),
            ("train:\n  schedule:\n    warmup_steps: x\n", "spec.yaml:3:5 train.schedule.warmup_steps"),
            ("parallel: {experts: {ep: x}}\n", "spec.yaml:1:22 parallel.experts.ep"),
            ("memory:\n  - {use: keep, regions: [layer, 3]}\n", "spec.yaml:2:34 memory[0].regions[1]"),
            ("memory:\n  - use: keep\n    regions: [layer]\n  -   use: 3\n", "spec.yaml:4:7 memory[1].use"),
            ("routing:\n  balance:\n  - kind: aux_loss\n    rate: x\n", "spec.yaml:4:5 routing.balance[0].rate"),
            ('\ufeff"tr\\u0061in": {steps: x}\n', "spec.yaml:1:16 train.steps"),
            ("# größe\n\n\n? train\n: steps: x\n", "spec.yaml:5:3 train.steps"),
            ("train:\r\n  steps: x\r\n", "spec.yaml:2:3 train.steps"),
            ("routing:\n  balance: [{rate: 1.0}]\n", "spec.yaml:2:13 routing.balance[0].kind"),
            ("memory: [{regions: [layer]}]\n", "spec.yaml:1:10 memory[0].use"),
            ('run: {"a.b": 1}\n', "spec.yaml:1:7 run.'a.b'"),
        ],
    )
    def test_are_those_of_the_key(self, text: str, where: str) -> None:
        assert complaint(text.encode("utf-8")).startswith(f"{where}: ")

    def test_a_default_section_stands_at_the_top_of_the_file(self) -> None:
        text = "# a comment\nmodel: {num_experts: 15}\nparallel: {experts: {ep: 2}}"
        with pytest.raises(MoefwError) as caught:
            assembled(text)
        assert caught.value.problems[0].where == "spec.yaml:2:1 gemm"

    @given(st.lists(st.integers(0, 30) | st.text(st.characters(categories=["L"]), min_size=1), min_size=1))
    def test_dotted_paths_read_back(self, path: list[str | int]) -> None:
        assert key_path(dotted((*path,))) == (*path,)


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
            ("model.qk_norm=false", False),
            ("parallel.experts.ep=4", 4),
            ("memory=[]", []),
            ("memory.0.regions=[router]", ["router"]),
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

    def test_drop_the_places_of_what_they_replace(self) -> None:
        override = "routing={use: topk, balance: [{kind: aux_loss, coeff: x}]}"
        assert complaint(GOOD, override).startswith(f"command line, {override!r} routing.balance[0].coeff: 'x'")


TEXT = st.text(st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"]), max_size=6)
"""Text that ruamel writes so that it reads it back."""


class TestYAML:
    @pytest.mark.parametrize(
        ("text", "where", "what"),
        [
            ("train: {steps: !!int 3}", "1:16 train.steps", "tags, anchors and aliases are not allowed"),
            ("train: !x {steps: 3}", "1:8 train", "tags, anchors and aliases are not allowed"),
            ("train: {steps: ! 3}", "1:16 train.steps", "tags, anchors and aliases are not allowed"),
            ("train: &t {steps: 3}", "1:8 train", "tags, anchors and aliases are not allowed"),
            ("train: {steps: *t}", "1:16 train.steps", "tags, anchors and aliases are not allowed"),
            ("train: {!x steps: 3}", "1:9 train.'?'", "tags, anchors and aliases are not allowed"),
            ("train: {steps: 3, lr: 1, steps: 4}", "1:26 train.steps", "'steps' stands here twice"),
            ("memory: []\ntrain: {}\nmemory: []", "3:1 memory", "'memory' stands here twice"),
            ("train: {3: 3}", "1:9 train", "3 is not a key"),
            ("train: {null: 3}", "1:9 train", "null is not a key"),
            ("train: {true: 3}", "1:9 train", "true is not a key"),
            ("train: {1.5: 3}", "1:9 train", "1.5 is not a key"),
            ("train:\n  ? [a]\n  : 3", "2:5 train", "['a'] is not a key"),
            ("train: {? {a: 1} : 3}", "1:11 train", "{'a': 1} is not a key"),
            ("train: {<<: {steps: 3}}", "1:9 train.'<<'", "is not an option here"),
            ("train: {steps: 9223372036854775808}", "1:16 train.steps", "does not fit into 64 bits"),
            ("train: {steps: -9223372036854775808}", "1:16 train.steps", "does not fit into 64 bits"),
            (f"train: {{steps: -{'9' * 9000}}}", "1:16 train.steps", "does not fit into 64 bits"),
            (f"train: {{steps: 0x{'f' * 9000}}}", "1:16 train.steps", "does not fit into 64 bits"),
            ('run: {dir: "a\\0"}', "1:12 run.dir", "a character that no file can hold"),
            ('run: {dir: "\\ud800"}', "1:12 run.dir", "a character that no file can hold"),
            ("train: {lr: .nan}", "1:9 train.lr", "nan is not a finite number"),
            ("train: {lr: -.inf}", "1:9 train.lr", "-inf is not a finite number"),
            ("train: {lr: 1e999}", "1:9 train.lr", "inf is not a finite number"),
            ("{" + "a: {" * 40 + "}" * 41, "1:82 a", "nested deeper than 20 levels"),
            ("a: " + "[" * 90_000, "1:24 a", "nested deeper than 20 levels"),
            ("? " * 40 + "a", "1:43 '?'", "nested deeper"),
            ("- a", "1:1", "this file holds a list"),
            ("--- |\n  text", "1:5", "this file holds a single value"),
            ("a: 1\n---\nb: 2", "2:1", "a second document starts here"),
            ("a: [1\nb: 2", "2:2", "this is not YAML"),
            ("a:\n\t- b", "2:1", "this is not YAML"),
            ("a: @b", "1:4", "this is not YAML"),
        ],
    )
    def test_refuses_at_the_place(self, text: str, where: str, what: str) -> None:
        told = complaint(text)
        assert told.startswith(f"spec.yaml:{where}: "), told
        assert what in told

    @pytest.mark.parametrize(
        ("data", "what"),
        [
            (b"", "this file holds nothing"),
            (b"# nothing\n", "this file holds nothing"),
            (b"---\n...\n", "this file holds nothing"),
            (b"\xff\xfe", "not UTF-8"),
            (b"model: \x80", "not UTF-8"),
            ("model: {}".encode("utf-16"), "not UTF-8"),
            (b"\x7fELF\x00\x01", "not YAML"),
            (b"a: \x00", "not YAML"),
            (b'a: "\\UFFFFFFFF"', "not YAML"),
            (b"#" * (MAX_BYTES + 1), "larger than 100,000 bytes"),
        ],
    )
    def test_files_that_hold_no_spec(self, data: bytes, what: str) -> None:
        told = complaint(data, "train.steps=5")
        assert told.startswith("spec.yaml")
        assert what in told

    @pytest.mark.parametrize(
        ("path", "what"), [("no.yaml", "no such file"), (".", "is a directory"), ("a\0b", "null byte")]
    )
    def test_paths_that_hold_no_file(self, path: str, what: str) -> None:
        with pytest.raises(SpecError) as caught:
            assemble(Path(path), defaults=DEFAULTS, registry=REGISTRY)
        assert what in str(caught.value)
        assert caught.value.problems[0].where == path

    def test_an_endless_file_is_not_read_to_its_end(self) -> None:
        with pytest.raises(SpecError, match="larger than"):
            assemble(Path("/dev/zero"), defaults=DEFAULTS, registry=REGISTRY)

    @pytest.mark.parametrize("bomb", ["[", "{a: ", "- ", "? ", "[\n", "&a [*a, ", "a: {", "!x [", "'", "|", "%"])
    def test_a_bomb_is_refused_in_no_time(self, bomb: str) -> None:
        start = time.process_time()
        complaints(bomb * (MAX_BYTES // len(bomb)))
        assert time.process_time() - start < 5

    @pytest.mark.parametrize(
        ("text", "value"),
        [
            ("no", "no"),
            ("yes", "yes"),
            ("on", "on"),
            ("Null", None),
            ("~", None),
            ("", None),
            ("TRUE", True),
            ("tRUE", "tRUE"),
            ("010", 10),
            ("0o10", 8),
            ("0x1F", 31),
            ("+3", 3),
            ("9223372036854775807", 2**63 - 1),
            ("1e-3", 1e-3),
            ("1.", 1.0),
            ("-.5E+2", -50.0),
            ("-.INF", -math.inf),
            ("2001-01-01", "2001-01-01"),
            ("1_000", "1_000"),
            ("1:30", "1:30"),
            ("0b1", "0b1"),
            ("٣", "٣"),
            (".", "."),
            ("e3", "e3"),
        ],
    )
    def test_scalars_are_those_of_the_core_schema(self, text: str, value: object) -> None:
        assert (scalar(text), type(scalar(text))) == (value, type(value))
        assert scalar(text, plain=False) == text

    @given(
        st.recursive(
            st.none() | st.booleans() | st.integers(-(2**63) + 1, 2**63 - 1) | st.floats() | TEXT,
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
            max_leaves=8,
        )
    )
    def test_what_ruamel_writes_reads_back(self, value: object) -> None:
        YAML().dump({"value": value}, out := StringIO())
        found = read_yaml(out.getvalue(), Marks("spec.yaml"), problems := [])
        assert problems == []
        assert repr(found) == repr({"value": value})


class TestValues:
    @pytest.mark.parametrize(
        ("text", "what"),
        [
            ("train: {steps: 2.7}", "2.7 is not a whole number."),
            ('train: {steps: "8"}', "'8' is not a whole number. Leave out the quotes."),
            ("train: {steps: true}", "true is not a whole number."),
            ("train: {steps: null}", "null is not a whole number."),
            ("train: {steps: [3]}", "[3] is not a whole number."),
            ("train: {lr: '1e-3'}", "'1e-3' is not a finite number. Leave out the quotes."),
            ("train: {lr: true}", "true is not a finite number."),
            ("run: {dir: 8}", "8 is not plain text. Put it in quotes."),
            ("run: {observers: topk}", "'topk' is not a list. Write for example [a, b]."),
            ("memory: [{use: keep, regions: block}]", "'block' is not a list."),
            ("memory: {use: keep}", "{'use': 'keep'} is not a list."),
            ("model: {qk_norm: 1}", "1 is not true or false."),
            ("model: {qk_norm: 'true'}", "'true' is not true or false. Leave out the quotes."),
            ("routing: {score: softmx}", "'softmx' is not one of the choices. Did you mean 'softmax'?"),
            ("routing: {score: 1}", "1 is not one of the choices. Known: sigmoid, softmax, sqrtsoftplus."),
            ("routing: {score: null}", "null is not one of the choices. Known: sigmoid, softmax, sqrtsoftplus."),
            ("train: {stepz: 3}", "'stepz' is not an option here. Did you mean 'steps'?"),
            ("zzz: 3", "'zzz' is not an option here. Known: data, dispatch, gemm, memory, "),
            ("gemm: {use: loop, preset: big}", "loop has no preset 'big'."),
            ("gemm: loop", "'loop' is not a mapping that names a plugin. Write {use: loop}."),
            ("memory: [{regions: [layer]}]", "'use' is missing."),
            ("routing: {balance: [{}]}", "'kind' is missing. It has no default."),
            ("train: {steps: 0}", "'steps' must be >= 1: 0."),
            ("train: {lr: -1}", "'lr' must be > 0.0: -1.0."),
        ],
    )
    def test_of_the_wrong_kind_are_refused_with_a_clear_message(self, text: str, what: str) -> None:
        assert what in complaint(text)

    def test_a_whole_number_is_fine_where_a_fraction_is(self) -> None:
        lr = assembled("train: {lr: 1}").spec.train.lr
        assert (lr, type(lr)) == (1.0, float)

    def test_every_bound_is_checked_in_one_run(self) -> None:
        text = "{train: {steps: 0, lr: 0, seq_len: 1, optimizer: {beta1: 1.0}}, model: {dim: 1}, run: {seed: -1}}"
        told = complaints(text)
        assert len(told) == 6
        for key in ("steps", "lr", "seq_len", "beta1", "dim", "seed"):
            assert any(f"'{key}' must be" in line for line in told)

    def test_keys_are_told_in_their_order(self) -> None:
        told = complaints("train: {zq: 1, yq: 1, xq: 1, wq: 1, vq: 1}")
        assert [line.split("'")[1] for line in told] == ["zq", "yq", "xq", "wq", "vq"]

    def test_what_a_spec_leaves_out_is_filled_section_by_section(self) -> None:
        defaults: dict[str, object] = {"a": {"use": "x", "size": 1}, "b": {"c": {"use": "y"}}, "d": []}
        assert with_defaults({}, defaults) == defaults
        assert with_defaults({"a": None, "b": {"c": None}}, defaults) == defaults
        assert with_defaults({"a": {"use": "z"}}, defaults)["a"] == {"use": "z"}
        assert with_defaults({"a": {"more": 2}}, defaults)["a"] == {"use": "x", "size": 1, "more": 2}
        assert with_defaults({"a": {"use": "x", "size": 3}}, defaults)["a"] == {"use": "x", "size": 3}
        assert with_defaults({"b": {"e": 1}}, defaults)["b"] == {"c": {"use": "y"}, "e": 1}
        assert with_defaults({"a": 3, "e": 4}, defaults) == {**defaults, "a": 3, "e": 4}


@frozen
class Inner:
    size: int = field(default=1, validator=ge(1))
    words: tuple[str, ...] = ()


@frozen(kw_only=True)
class Options:
    """Options of every type that a plugin may have."""

    required: int
    pair: tuple[int, str] = (1, "a")
    shares: Mapping[str, float] = field(factory=dict)
    either: int | Literal["auto"] = "auto"
    maybe: tuple[Inner, ...] | None = None
    inner: Inner | None = None
    anything: Any = None
    few: tuple[int, ...] = field(default=(), validator=max_len(2))
    level: Literal[0, 1] = 0
    low: int = 0
    high: int = field(default=9)

    @high.validator
    def _above_low(self, _: object, value: int) -> None:
        if value < self.low:
            raise ValueError(f"high {value} is below low {self.low}")


def built(**data: object) -> tuple[Options | None, list[str]]:
    problems: list[Problem] = []
    found = structure(Options, data, (), Marks("o"), problems)
    return found, [str(problem) for problem in problems]


class TestStructure:
    def test_builds_nested_options_of_every_type(self) -> None:
        data = {"pair": [2, "b"], "shares": {"a": 1}, "either": 3, "maybe": [{"size": 2, "words": ["w"]}]}
        found, told = built(required=1, inner={}, anything=[{}], **data)
        assert told == []
        maybe = (Inner(2, ("w",)),)
        wanted = Options(
            required=1, pair=(2, "b"), shares={"a": 1.0}, either=3, maybe=maybe, inner=Inner(), anything=[{}]
        )
        assert found == wanted
        assert built(**plain(wanted)) == (wanted, [])

    @pytest.mark.parametrize(
        ("data", "told"),
        [
            ({"pair": [2]}, "o pair: [2] is not a list of 2. Write for example [a, b]."),
            ({"pair": ["b", "b"]}, "o pair[0]: 'b' is not a whole number. Write for example 8."),
            ({"shares": {"a": "b"}}, "o shares.a: 'b' is not a finite number. Write for example 0.5."),
            ({"shares": []}, "o shares: [] is not a mapping. Write for example {key: value}."),
            ({"either": "atuo"}, "o either: 'atuo' is not a whole number or auto."),
            ({"maybe": "w"}, "o maybe: 'w' is not a list. Write for example [a, b]."),
            ({"maybe": [{"size": 0}]}, "o maybe[0].size: 'size' must be >= 1: 0."),
            ({"inner": {"sizes": 2}}, "o inner.sizes: 'sizes' is not an option here. Did you mean 'size'?"),
            ({"inner": {"words": [1]}}, "o inner.words[0]: 1 is not plain text. Put it in quotes."),
            ({"low": 5, "high": 4}, "o: high 4 is below low 5."),
            ({"low": "x", "high": -1}, "o low: 'x' is not a whole number. Write for example 8."),
            ({"level": True}, "o level: true is not one of the choices. Known: 0, 1."),
            ({"few": [1, 2, 3]}, "o few: Length of 'few' must be <= 2: 3."),
        ],
    )
    def test_says_what_is_wrong_once(self, data: dict[str, object], told: str) -> None:
        assert built(required=1, **data)[1] == [told]

    def test_what_could_not_be_read_fails_when_it_is_looked_at(self) -> None:
        found, told = built(required="x", low="y", inner={"size": "z"}, high=3)
        assert len(told) == 3
        assert found is not None
        assert found.required is UNREAD
        assert found.high == 3
        assert found.inner is not None
        assert found.inner.words == ()
        looks = (bool, str, repr, hash, int, len, list, lambda v: v + 1, lambda v: v < 1, lambda v: v == 1, "{}".format)
        for value in (found.required, found.low, found.inner.size, UNREAD.deeper.still):
            for look in looks:
                with pytest.raises(TypeError):
                    look(value)

    def test_a_type_that_no_spec_can_hold_is_the_plugins_mistake(self) -> None:
        @frozen
        class Odd:
            when: complex = 0j

        with pytest.raises(PluginError, match="complex"):
            structure(Odd, {"when": 1}, (), Marks("o"), [])


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, 1, -1, 2**31, 2**62, 2**63 - 1, 2**63, 10**30, -(10**400), 0.5, 1e308, 1e-320]),
    st.floats(),
    st.text(max_size=6),
    st.sampled_from(["topk", "keep", "decoder", "2001-01-01", "no", "~", "8", "qwen3-moe-tiny", "sigmoid", "."]),
    st.sampled_from([[], {}, [[]], [{}], {"use": "keep"}, {"a": {"b": {"c": 1}}}]).map(copy.deepcopy),
)
FRAGMENTS = st.one_of(
    st.sampled_from(
        """&a *a !!int !x !!binary !<%FF> <<: ? : - , [ ] { } | > |9 " ' # % @ ` --- ... \t \r \0 \x85 \u2028 \ufeff \x7f
        .nan -.inf 1e999 0x 0xffffffffffffffffff 2001-01-01T00:00:00Z 12:30 ~ null true -5 99999999999999999999 1_0 é 🦜
        \\ud800 %YAML""".split(" ")
    ),
    st.sampled_from(["\n", "\n  ", "\n- ", ": ", " #", "use: ", "use: keep\n", "[" * 30, "{a: " * 30, "- " * 30, "\t"]),
    st.text(max_size=5),
)


def flow(value: object) -> str:
    """A value in YAML's flow style, NaN and infinities included."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)}: {flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(flow, value)) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return {"nan": ".nan", "inf": ".inf", "-inf": "-.inf"}[repr(value)]
    return json.dumps(value)


def containers(node: Any) -> list[Any]:
    inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return [node, *(found for item in inner for found in containers(item))] if isinstance(node, dict | list) else []


@st.composite
def torn_texts(draw: st.DrawFn) -> str:
    """The good spec with pieces of its text put in, cut out, doubled and moved."""
    text = GOOD
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.integers(0, 12)))
        piece = draw(st.sampled_from(["put", "cut", "double", "replace"]))
        new = {"cut": "", "double": text[start:end] * 2}.get(piece)
        text = text[:start] + (draw(FRAGMENTS) if new is None else new) + text[start if piece == "put" else end :]
    return text


@st.composite
def torn_trees(draw: st.DrawFn) -> str:
    """The good spec as data, with values changed, deleted, renamed and wrapped."""
    tree = read_yaml(GOOD, Marks("good"), [])
    for _ in range(draw(st.integers(1, 3))):
        node = draw(st.sampled_from(containers(tree)))
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            continue
        key = draw(st.sampled_from(keys))
        change = draw(st.sampled_from(["set", "delete", "add", "wrap", "deepen", "swap"]))
        if change == "set":
            node[key] = draw(JUNK)
        elif change == "delete":
            del node[key]
        elif change == "add" and isinstance(node, dict):
            node[draw(st.text(max_size=6) | st.sampled_from(["use", "preset", "stepz", "num_layers", "dp"]))] = draw(
                JUNK
            )
        elif change == "wrap":
            node[key] = [node[key]]
        elif change == "deepen":
            node[key] = {"use": node[key]}
        else:
            other = draw(st.sampled_from(keys))
            node[key], node[other] = node[other], node[key]
    return flow(tree)


KEYS = st.sampled_from(
    """model routing dispatch gemm memory parallel data train run use preset regions experts ep dense dp pp steps lr seed
    balance 0 1 7 -1 kind num_layers num_experts top_k schedule optimizer dir device observers ² ٣""".split()
)
OVERRIDES = st.one_of(
    st.builds(lambda keys, value: f"{'.'.join(keys)}={value}", st.lists(KEYS, min_size=1, max_size=4), JUNK.map(flow)),
    st.builds(lambda keys, value: f"{'.'.join(keys)}={value}", st.lists(KEYS, min_size=1, max_size=3), FRAGMENTS),
    st.text(max_size=12),
)
MUTATED = st.one_of(
    torn_texts(),
    torn_trees(),
    torn_trees(),
    st.just(GOOD),
    st.binary(max_size=40),
    st.sampled_from(["", "[]", "a", "~"]),
)


def test_2000_mutated_specs_are_sound_or_refused_with_a_place() -> None:
    outcomes: Counter[bool] = Counter()

    @settings(max_examples=2000)
    @given(MUTATED, st.lists(OVERRIDES, max_size=2))
    def check_one(spec: str | bytes, overrides: list[str]) -> None:
        data = spec.encode(errors="surrogatepass") if isinstance(spec, str) else spec
        told: tuple[Problem, ...] = ()
        try:
            found = assembled(data, *overrides)
            json.dumps(found.resolved(), allow_nan=False)
            assert found.digest()
        except MoefwError as error:
            told = error.problems
            outcomes[False] += 1
        else:
            outcomes[True] += 1
        for problem in told:
            assert problem.what
            assert problem.where.startswith(("spec.yaml", "command line, "))
            assert len(str(problem).splitlines()) == 1

    check_one()
    assert outcomes[True] > 50
    assert outcomes[False] > 1000
