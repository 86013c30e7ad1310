"""Model TFLOPS and MFU of a run: known once its plan is, from the operations a token that the plan measured."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from attrs import evolve

from moefw.commands import specs
from moefw.planner import cluster, ledger
from moefw.planner.cluster import Figure, Peaks
from moefw.training import ledger_file, trainer
from moefw.training.model_flops import ModelFlops
from moefw.training.records.metrics import read_metrics
from moefw.training.run_facts import device_name
from moefw.training.world import ALONE
from small_spec import small_spec

H100 = "NVIDIA H100 80GB HBM3"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.json"


def planned(path: Path, **predicted: object) -> None:
    path.write_text(json.dumps({"predicted": {"flops_per_token": 3e9, "dtype": "bfloat16", **predicted}}))


def test_they_are_known_once_the_plan_is(path: Path) -> None:
    figures = ModelFlops(path, ranks=2, name="a processor, 1 thread")
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
    figures = ModelFlops(path, ranks=1, name=H100).of(1e5)
    peak = PEAKS[dtype]
    assert figures["model_tflops_per_gpu"] == pytest.approx(300.0)
    assert figures.get("mfu") == (None if peak is None else pytest.approx(300.0 / peak))


def test_a_processor_and_an_unknown_gpu_have_no_mfu(path: Path) -> None:
    planned(path)
    for name in ("a processor, 1 thread", "a GPU of tomorrow"):
        assert ModelFlops(path, ranks=1, name=name).of(1.0).keys() == {"model_tflops_per_gpu"}


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the empty folder of the user's own clusters."""
    monkeypatch.setenv("MOEFW_CACHE", str(tmp_path / "cache"))
    cluster.own_folder().mkdir(parents=True)
    return cluster.own_folder()


def of_mine(folder: Path, name: str, **peaks: float) -> None:
    """Write a cluster of one's own with a GPU or a processor of a name."""
    figures = {format: Figure(value=peak, source="measured") for format, peak in peaks.items()}
    of_h100 = cluster.read("h100")
    gpu = evolve(of_h100.gpu, names=(name,), peak_tflops=Peaks(**figures))
    (folder / "mine.yaml").write_text(cluster.written(evolve(of_h100, gpu=gpu)))


def test_a_processor_of_ones_own_cluster_has_one(path: Path, own: Path) -> None:
    of_mine(own, "a processor, 2 threads", bf16=0.5, fp32=0.1)
    for dtype, peak in (("bfloat16", 0.5), ("float32", 0.1)):
        planned(path, dtype=dtype)
        assert ModelFlops(path, ranks=1, name="a processor, 2 threads").of(10.0)["mfu"] == pytest.approx(0.03 / peak)
    assert "mfu" not in ModelFlops(path, ranks=1, name="a processor, 1 thread").of(10.0)


def test_the_peak_of_a_gpu_that_moefw_has_stays_the_published_one(path: Path, own: Path) -> None:
    of_mine(own, H100, bf16=700.0, fp32=50.0)
    planned(path)
    assert ModelFlops(path, ranks=1, name=H100).of(1e5)["mfu"] == pytest.approx(300.0 / 989.4)
    planned(path, dtype="float32")
    assert ModelFlops(path, ranks=1, name=H100).of(1e5)["mfu"] == pytest.approx(300.0 / 50.0)


def test_a_damaged_cluster_of_ones_own_ends_no_run(path: Path, own: Path) -> None:
    (own / "mine.yaml").write_text("about: {")
    planned(path)
    with pytest.warns(UserWarning, match="the run has no mfu, as a cluster cannot be read: .*mine.yaml:1"):
        assert ModelFlops(path, ranks=1, name="a processor, 1 thread").of(1.0).keys() == {"model_tflops_per_gpu"}


def test_a_run_records_what_its_plan_says(tmp_path: Path, own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    of_mine(own, f"{device_name(torch.device('cpu'))}, 1 thread", bf16=1.0, fp32=0.25)
    assembly = specs.read(str(small_spec(tmp_path)), ())
    Path(assembly.spec.run.dir).mkdir()
    plan = ledger(assembly)
    ledger_file.write(assembly, predicted=plan.to_data())
    trainer.train(assembly, ALONE, resume=None)
    assert plan.flops_per_token is not None
    for line in read_metrics(Path(assembly.spec.run.dir) / "metrics.jsonl"):
        tflops = line["tokens_per_s"] * plan.flops_per_token / 1e12
        assert math.isclose(line["model_tflops_per_gpu"], tflops, rel_tol=1e-6)
        assert math.isclose(line["mfu"], line["model_tflops_per_gpu"] / 0.25, rel_tol=1e-6)
