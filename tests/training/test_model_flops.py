"""Model TFLOPS and MFU of a run: known once its plan is, from the operations a token that the plan measured."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from moefw.commands import specs
from moefw.planner import ledger
from moefw.training import ledger_file, trainer
from moefw.training.model_flops import ModelFlops
from moefw.training.records.metrics import read_metrics
from moefw.training.world import ALONE
from small_spec import small_spec

H100 = "NVIDIA H100 80GB HBM3"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.json"


def planned(path: Path, **predicted: object) -> None:
    path.write_text(json.dumps({"predicted": {"flops_per_token": 3e9, "dtype": "bfloat16", **predicted}}))


def test_they_are_known_once_the_plan_is(path: Path) -> None:
    figures = ModelFlops(path, ranks=2, gpu=None)
    assert figures.of(1000.0) == {}
    path.write_text(json.dumps({"no_plan": "it is made"}))
    assert figures.of(1000.0) == {}
    planned(path)
    assert figures.of(1000.0) == {"model_tflops_per_gpu": 1000.0 * 3e9 / 2 / 1e12}
    path.unlink()
    assert figures.of(2000.0) == {"model_tflops_per_gpu": 3.0}


PEAKS = {"bfloat16": 989.4, "float8_e4m3fn": 1978.9, "float4_e2m1fn_x2": None, "float32": None}


@pytest.mark.parametrize("dtype", PEAKS)
def test_mfu_is_a_share_of_the_peak_of_the_format_in_which_the_model_multiplies(path: Path, dtype: str) -> None:
    planned(path, dtype=dtype)
    figures = ModelFlops(path, ranks=1, gpu=H100).of(1e5)
    peak = PEAKS[dtype]
    assert figures["model_tflops_per_gpu"] == pytest.approx(300.0)
    assert figures.get("mfu") == (None if peak is None else pytest.approx(300.0 / peak))


def test_a_processor_and_an_unknown_gpu_have_no_mfu(path: Path) -> None:
    planned(path)
    for gpu in (None, "a GPU of tomorrow"):
        assert ModelFlops(path, ranks=1, gpu=gpu).of(1.0).keys() == {"model_tflops_per_gpu"}


def test_a_run_records_what_its_plan_says(tmp_path: Path) -> None:
    assembly = specs.read(str(small_spec(tmp_path)), ())
    Path(assembly.spec.run.dir).mkdir()
    plan = ledger(assembly)
    ledger_file.write(assembly, predicted=plan.to_data())
    trainer.train(assembly, ALONE, resume=None)
    assert plan.flops_per_token is not None
    for line in read_metrics(Path(assembly.spec.run.dir) / "metrics.jsonl"):
        tflops = line["tokens_per_s"] * plan.flops_per_token / 1e12
        assert math.isclose(line["model_tflops_per_gpu"], tflops, rel_tol=1e-6)
        assert "mfu" not in line
