"""GEMMs of experts are compared in one race: over fakes, since each needs a GPU or a library that is not here."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
from attrs import frozen

import moefw
from triton_on_cpu import TritonOnCpu

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "quack_gemm"


@frozen
class Doubled(TritonOnCpu):
    """Experts of twice the right output."""

    name: ClassVar[str] = "doubled"

    def build(self, context: moefw.BuildContext) -> moefw.ExpertGemm:
        experts: Any = super().build(context)
        right = experts.forward
        experts.forward = lambda batch: 2 * right(batch)
        return experts


@pytest.fixture
def goals(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for folder in (ROOT / "benchmarks", EXAMPLE, EXAMPLE / "tests"):
        monkeypatch.syspath_prepend(str(folder))
    return importlib.import_module("layer_goals")


def declared(goals: ModuleType, *plugins: type[moefw.GemmPlugin]) -> list[Any]:
    """Return the GEMM of these plugins as the benchmark names them, behind ``grouped``."""
    modules = [SimpleNamespace(moefw_gemms=moefw.hookimpl(lambda plugin=each: [plugin])) for each in plugins]
    declare = zip(plugins, modules, strict=True)
    return [goals.gemms.GROUPED, *(goals.Gemm(plugin.name, (module,)) for plugin, module in declare)]


def compare(goals: ModuleType, monkeypatch: pytest.MonkeyPatch, candidates: list[Any]) -> tuple[dict[str, Any], Any]:
    monkeypatch.setattr(goals.gemms, "NAMES", tuple(each.name for each in candidates))
    monkeypatch.setattr(goals.gemms, "gemms", lambda: candidates)
    measured, told = goals.PARTS["gemms-a"](goals.Run(dry=True, rounds=1))
    return measured, {goal["what"]: goal["measured"] for goal in told}


def test_every_gemm_that_is_right_and_liger_race_on_the_same_weights(
    goals: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = goals.peers
    monkeypatch.setattr(peers, "PEERS", {**peers.PEERS, "liger": peers.PEERS["hugging face"]})
    monkeypatch.setattr(peers, "ON_A_CPU", ("liger",))
    quack = importlib.import_module("quack_on_cpu").QuackOnCpu
    candidates = declared(goals, TritonOnCpu, quack)
    measured, told = compare(goals, monkeypatch, candidates)
    raced = ["grouped", TritonOnCpu.name, quack.name, "liger"]
    assert measured["left_out"] == {}
    assert {*measured["ms"]} == {"matmul", *(f"{each}, {way}" for each in raced for way in ("forward", "fwd+bwd"))}
    assert None not in told.values()
    assert {f"8a {each}, fwd+bwd over liger" for each in raced[:3]} < {*told}
    assert {f"8a {each}, fwd+bwd over grouped" for each in raced[1:3]} < {*told}
    assert measured["tflops"].keys() == measured["ms"].keys()


def test_what_is_refused_wrong_or_not_there_is_named_and_not_timed(
    goals: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    candidates = [*declared(goals, Doubled), goals.Gemm("triton")]
    measured, told = compare(goals, monkeypatch, candidates)
    left_out = measured["left_out"]
    assert left_out["triton"].startswith("triton needs device cuda")
    assert left_out["doubled"].startswith("computes something else: out off by 100")
    assert left_out["liger"]
    assert {*measured["ms"]} == {"matmul", "grouped, forward", "grouped, fwd+bwd"}
    assert told["8a doubled, fwd+bwd over grouped"] is None
    said = capsys.readouterr().out
    for each, why in left_out.items():
        assert f"a, without {each}: {why}" in said


def test_the_candidates_are_ours_and_the_example(goals: ModuleType) -> None:
    assert tuple(each.name for each in goals.gemms.gemms()) == goals.gemms.NAMES == ("grouped", "triton", "quack")
