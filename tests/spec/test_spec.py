"""All errors of a spec are reported once, each at its place."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from moefw.commands.check import check
from moefw.compose.spec.source import dotted, key_path
from moefw.core.errors import MoefwError, Problem
from spec_cases import GOOD, assembled, complaint, complaints

pytestmark = pytest.mark.usefixtures("empty_folder")


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
        "spec.yaml:10:3 train.steps: 2.7 is not a whole number. Write for example 300.",
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
    """A mistake is reported once: unreadable values cause no further errors."""

    @pytest.mark.parametrize(
        ("wrong", "told"),
        [
            ("{model: {num_experts: many}, parallel: {experts: {ep: 3}}}", "'many' is not a whole number"),
            ("{model: {top_k: many, num_experts: 2}}", "'many' is not a whole number"),
            ("{model: {vocab_size: many}, data: {tokenizer: bpe-2048}}", "'many' is not a whole number"),
            ("{model: {num_expert: 9}, parallel: {experts: {ep: 3}}}", "Did you mean 'num_experts'?"),
            ("{modle: {num_experts: 9}, parallel: {experts: {ep: 3}}}", "Did you mean 'model'?"),
            ("{model: {preset: qwen3-moe-tny}, parallel: {experts: {ep: 64}}}", "Did you mean 'qwen3-moe-tiny'?"),
            ("{model: {use: decodr}, memory: [{use: keep, regions: [attention]}]}", "Did you mean 'decoder'?"),
            ("{routing: {score: sigmiod, balance: [{kind: expert_bias}]}}", "Did you mean 'sigmoid'?"),
            ("{gemm: {use: lop}, memory: [{use: keep, regions: [moe_act]}]}", "Did you mean 'loop'?"),
            ("{dispatch: {use: 3}, gemm: {use: loop}}", "3 is not the name of a plugin"),
            ("{dispatch: alltoall, gemm: {use: loop}}", "Write {use: alltoall}."),
            ("{memory: [{use: keep, regoins: [moe_act]}]}", "Did you mean 'regions'?"),
            ("{memory: [{use: keep, regions: [layer, 3]}]}", "3 is not plain text"),
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
        text = "{model: {top_k: many, num_experts: 15}, attention: {head_dim: 3}, parallel: {experts: {ep: 2}}, gemm: {use: loop}}"
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

    def test_an_unknown_preset_is_told_beside_an_override_that_is_no_yaml(self) -> None:
        override, preset = complaints("model: {preset: qwen}", "routing='")
        assert override.startswith("command line")
        assert preset.startswith("spec.yaml:1:9 model.preset: ")


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

    # A longer key is cut where an error shows it.
    @given(st.lists(st.integers(0, 30) | st.text(st.characters(categories=["L"]), min_size=1, max_size=60), min_size=1))
    def test_dotted_paths_read_back(self, path: list[str | int]) -> None:
        assert key_path(dotted((*path,))) == (*path,)
