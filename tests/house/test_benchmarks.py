"""Benchmarks are not tests, but they must run: code that nobody runs breaks unnoticed."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from moefw.testing.training import SMALL

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_the_layer_written_by_hand_computes_what_the_plugins_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin tax benchmark compares both, bit for bit, before it measures."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    plugin_tax = importlib.import_module("plugin_tax")
    seconds = plugin_tax.race(16, 16, rounds=1)
    assert {name: len(each) for name, each in seconds.items()} == {"built": 1, "inline": 1, "inline again": 1}


def test_only_scales_that_are_rounded_up_leave_block_maxima_of_nvfp4_without_bias(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    nvfp4_bias = importlib.import_module("nvfp4_bias")
    x = nvfp4_bias.one_large_in_16(64)
    nearest, up = (nvfp4_bias.measure(x, scales, 32) for scales in ("nearest", "up"))
    assert nearest["block_maxima"] < -0.008
    assert abs(up["block_maxima"]) < 0.003


def test_dropped_rows_leave_the_tokens_and_the_pre_activation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The saved bytes benchmark compares the results of its modes, and counts the live bytes of each."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    saved_bytes = importlib.import_module("saved_bytes")
    shape = {"tokens": 64, "dim": 512, "expert_dim": 256, "experts": 8, "top_k": 4}
    held = {row["mode"]: row["of_minimum"] for row in saved_bytes.measure(shape, rounds=1)}
    rows = 2 * 4 * 512 / (2 * 512 + 4 * 4 * 256)
    assert held["recompute dispatch and router"] < held["recompute dispatch"] < held["keep"] < held[saved_bytes.PEER]
    assert held["recompute dispatch and router"] < 1.02
    assert held["keep"] - held["recompute dispatch"] == pytest.approx(rows, abs=0.02)


def test_adapters_are_measured_beside_those_of_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    fine_tune = importlib.import_module("fine_tune")
    rows = fine_tune.measure(fine_tune.SMALL, (1, 32), rounds=1)
    ours, peer, whole = (rows[name] for name in (fine_tune.OURS, fine_tune.PEER, "moefw, all weights"))
    assert ours["trained"] == peer["trained"] < whole["trained"] / 4
    assert ours["state_bytes"] == peer["state_bytes"] == 2 * 4 * ours["trained"]
    assert ours["saved_bytes"] < peer["saved_bytes"]


def test_a_save_beside_steps_is_measured_beside_one_that_training_waits_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("MOEFW_RESULTS", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    saves = importlib.import_module("saves")
    train = {**saves.TRAIN, "tokens_per_step": 64, "seq_len": 16}
    found = saves.main(1, sizes={"vocab_size": 64}, train=train, dry=True)
    assert found["blocked_s"] > 0
    assert found["bytes"] > 0
    assert found["steps_beside_save"] >= 1


def test_a_recorded_step_is_measured_beside_one_that_is_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("MOEFW_RESULTS", str(tmp_path))
    monkeypatch.setenv("MOEFW_CACHE", str(tmp_path / "cache"))
    recording = importlib.import_module("recording")
    (tmp_path / "text.txt").write_text("a fox jumps over a dog\n" * 500)
    small = (f"data.path={tmp_path}/text.txt", "data.tokenizer=bytes", "model.vocab_size=256", "model.num_layers=1")
    sizes = ("train.seq_len=64", "train.tokens_per_step=512", "train.eval_tokens=512", "precision.use=fp32")
    measured = recording.main(1, *small, *sizes, dry=True)
    assert measured["wall_s"].keys() == {"off", "on", "control"}
    assert measured["processor_ratio"].keys() == {"on", "control"}
    assert all(seconds > 0 for seconds in measured["parts_processor_s"].values() if seconds)
    assert measured["share_of_step"] > 0
    assert (tmp_path / "recording.json").is_file()


def test_a_logged_step_is_played_on_a_virtual_clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("MOEFW_RESULTS", str(tmp_path))
    overlap = importlib.import_module("overlap")
    small = {"dim": 32, "expert_dim": 32, "shared_expert_dim": 16, "vocab_size": 64, "num_layers": 2}
    monkeypatch.setattr(overlap, "SIZES", {**overlap.SIZES, **small})
    monkeypatch.setattr(overlap, "MICRO_BATCHES", 3)
    overlap.main(1, dry=True)
    measured = json.loads((tmp_path / "overlap.json").read_text())
    hidden = {row["order"]: row["hidden"] for row in measured["virtual"] if row["wire_share"] == 0.5}
    assert 0 < hidden["in order"] < hidden["merged"] < 1
    assert len(measured["deepseek_v3"]) == 4


def test_a_traced_step_is_measured_beside_plain_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("MOEFW_RESULTS", str(tmp_path))
    tracing = importlib.import_module("tracing")
    monkeypatch.setattr(tracing, "WARM_UP", 1)
    tracing.main(2, "model.num_layers=1", "train.micro_batch=1", dry=True)
    measured = json.loads((tmp_path / "tracing.json").read_text())
    assert measured["spans_of_step"] > 20
    assert measured["step_s"] > 0


def test_sizes_of_checkpoints_are_those_of_the_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each parameter and two moments in fp32, once, whatever the layout; a rank of two that share all writes half."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    checkpoint_sizes = importlib.import_module("checkpoint_sizes")
    spec = dict(SMALL)
    alone = checkpoint_sizes.count(spec, 1, 1)
    shared = checkpoint_sizes.count({**spec, "parallel": {"dense": {"shard": "all"}, "experts": {"ep": 2}}}, 2, 2)
    assert abs(shared["checkpoint"] - alone["checkpoint"]) <= 64  # numbers of steps of each rank
    assert shared["written"] == pytest.approx(alone["written"] / 2, rel=0.02)
    assert shared["read"] == pytest.approx(alone["read"] / 2, rel=0.02)
    assert alone["written"] == pytest.approx(alone["read"], rel=0.02)
