"""torchrun restarts a run whose ranks are killed: it ends as if nothing had happened."""

from __future__ import annotations

import random
import signal
import sys
from pathlib import Path

import pytest

from kill_chain import EVERY, QUICK, RANKS, STEPS, Unbroken
from training_process import TrainingProcess, checkpoints, history, newest

CHANCE = random.Random(3)
KILLS = [(CHANCE.randrange(RANKS), EVERY + CHANCE.randrange(2 * EVERY)) for _ in range(3)]

pytestmark = pytest.mark.deep


@pytest.mark.fault(
    "torchrun --max-restarts=3, three ranks killed at random steps",
    "reaches the end; losses of all steps and the last weights bit-equal to an unbroken run",
)
def test_torchrun_brings_a_run_of_killed_ranks_to_the_end_of_an_unbroken_one(
    spec: Path, unbroken: Unbroken, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", "--max-restarts=3"]
    command = [sys.executable, *torchrun, "-m", "moefw", "train", str(spec), f"run.dir={run_dir}"]
    with TrainingProcess(command, run_dir=run_dir, environment=QUICK) as run:
        for rank, steps in KILLS:
            run.wait_for_step(newest(run_dir) + steps)
            run.signal_rank(rank, signal.SIGKILL)
            run.restarted()
        assert (ended := run.ended(timeout_s=600)).code == 0, ended.err
    assert history(run_dir) == unbroken.records
    assert checkpoints(run_dir)[STEPS] == unbroken.tensors[STEPS]
