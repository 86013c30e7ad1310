"""The records of a long run of a large model stay small: 20,000 steps of 58 layers and 256 experts, in 100 MB."""

from __future__ import annotations

import resource
from pathlib import Path

import numpy as np
import pytest

from moefw.training.full_disk import written
from moefw.training.records.expert_load import EXPERT_LOAD, MOST_WINDOWS, read_expert_load
from moefw.training.records.experts import summary
from moefw.training.records.json_lines import Record
from moefw.training.records.metrics import METRICS, read_metrics
from moefw.training.records.run_log import RunLog

STEPS, LAYERS, EXPERTS = 20_000, 58, 256
MOST_BYTES = 100_000_000
NUMBERS = ("loss", "aux_loss", "z_loss", "grad_norm", "lr", "load_max_over_mean", "tokens_per_s", "eval_loss", "more")
SECTIONS = ("data", "forward", "backward", "weight gradients", "gradients", "results", "optimizer", "other")


def line(step: int, load_LE: np.ndarray, chance: np.random.Generator) -> Record:
    """A line as long as any, of numbers with all of their digits."""
    return {
        "step": step,
        "time": 1795755777.278,
        **dict(zip(NUMBERS, chance.random(len(NUMBERS)).tolist(), strict=True)),
        "loss_shares": {"aux_loss": 0.003821, "z_loss": 0.001234},
        "grad_norms": dict(zip(("routers", "experts", "attention", "rest"), chance.random(4).tolist(), strict=True)),
        "experts": summary(load_LE, chance.random(LAYERS).tolist()),
        "seconds": {section: round(chance.random(), 6) for section in SECTIONS},
    }


def write(run_dir: Path, steps: int) -> None:
    chance = np.random.default_rng(0)
    loads = [EXPERTS * chance.dirichlet(np.full(EXPERTS, 2.0), LAYERS) for _ in range(7)]
    lists = [load.tolist() for load in loads]
    with RunLog() as log:
        log.open(run_dir, keep_until=None, writing=written)
        for step in range(1, steps + 1):
            record = line(step, loads[step % 7], chance)
            log.step(record, range(LAYERS), lists[step % 7])
            log.event("checkpoint", step, path=f"checkpoints/step-{step}", seconds=record["seconds"]["data"])


def size(run_dir: Path) -> int:
    return sum(path.stat().st_size for path in run_dir.rglob("*") if path.is_file())


def test_what_a_step_adds_leaves_room_for_the_windows(tmp_path: Path) -> None:
    write(tmp_path, 20)
    window = (tmp_path / EXPERT_LOAD).stat().st_size / 20
    step = size(tmp_path) / 20 - window
    assert STEPS * step + MOST_WINDOWS * window < MOST_BYTES


@pytest.mark.deep
def test_a_whole_run_stays_below_100_mb_and_is_read_as_a_stream(tmp_path: Path) -> None:
    write(tmp_path, STEPS)
    assert size(tmp_path) < MOST_BYTES
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert sum(1 for _ in read_metrics(tmp_path / METRICS)) == STEPS
    windows = list(read_expert_load(tmp_path / EXPERT_LOAD))
    assert len(windows) <= MOST_WINDOWS
    assert (windows[0].first, windows[-1].last) == (1, STEPS)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MOST_BYTES
