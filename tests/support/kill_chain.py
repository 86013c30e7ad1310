"""A run that is killed and resumed repeatedly, compared with one that is not."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from training_process import TRAIN, TrainingProcess, checkpoints, history, newest

EVERY, STEPS = 6, 260
"""Steps between checkpoints, and of the run: enough for twenty starts of at most ``2 * EVERY`` steps each."""
STEP_S = 0.03
SPEC = f"""\
model: {{dim: 16, num_layers: 1, num_experts: 4, top_k: 2, expert_dim: 16}}
attention: {{num_heads: 1, num_kv_heads: 1, head_dim: 16}}
routing: {{use: topk, score: sigmoid, balance: [{{kind: expert_bias}}]}}
parallel: {{experts: {{ep: 2}}}}
data: {{use: text, path: %s}}
train:
  {{steps: {STEPS}, tokens_per_step: 256, micro_batch: 2, seq_len: 64, checkpoint_every: {EVERY}, eval_every: 0, eval_tokens: 64}}
run: {{dir: %s, device: cpu}}
"""
RANKS = 2
SHIM = Path(__file__).with_name("kill_in_save.c")
"""Source of the library that kills a process inside a save."""
QUICK = {"OMP_NUM_THREADS": "1"}


@frozen
class Unbroken:
    """An undisturbed run of the spec: its records, and the tensors of all checkpoints, by step."""

    records: Mapping[int, dict[str, Any]]
    tensors: Mapping[int, Mapping[str, bytes]]


def train(spec: Path, run_dir: Path, *overrides: str, environment: Mapping[str, str] | None = None) -> TrainingProcess:
    """Start ranks that train into a folder."""
    command = [*TRAIN, str(spec), f"run.dir={run_dir}", *overrides]
    return TrainingProcess(command, run_dir=run_dir, environment={**QUICK, **(environment or {})})


def unbroken(spec: Path, run_dir: Path) -> Unbroken:
    with train(spec, run_dir, f"train.keep_checkpoints={STEPS}") as run:
        ended = run.ended()
    assert ended.code == 0, ended.err
    return Unbroken(history(run_dir), checkpoints(run_dir))


class KillChain:
    """The starts of one run; each resumes where the previous one was killed."""

    def __init__(self, spec: Path, run_dir: Path, whole: Unbroken) -> None:
        self.spec, self.run_dir, self.whole = spec, run_dir, whole

    def start(self, environment: Mapping[str, str] | None = None) -> TrainingProcess:
        return train(self.spec, self.run_dir, "--resume=auto", environment=environment)

    def at(self, run: TrainingProcess, steps: float) -> None:
        """Wait until a start has made ``steps`` steps; a fraction is a share of a step's usual time."""
        run.wait_for_step(newest(self.run_dir) + int(steps))
        run.wait_for_ranks(RANKS)
        time.sleep(steps % 1 * STEP_S)

    def check(self, run: TrainingProcess) -> None:
        """Raise AssertionError if ranks are left, or if a checkpoint differs from the unbroken run's."""
        assert not run.orphans()
        for step, tensors in checkpoints(self.run_dir).items():
            assert tensors == self.whole.tensors[step], f"the checkpoint of step {step} is torn or another one"

    def check_end(self) -> None:
        """Run to the end, and compare every step and the last weights with the unbroken run, bit by bit."""
        with self.start() as run:
            assert (ended := run.ended()).code == 0, ended.err
        assert history(self.run_dir) == self.whole.records
        assert checkpoints(self.run_dir)[STEPS] == self.whole.tensors[STEPS]


def compiled(source: Path, folder: Path) -> Path:
    """Return a C file as a library that can be preloaded."""
    library = folder / f"{source.stem}.so"
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library


def preloaded(shim: Path, run_dir: Path, step: int, log: Path) -> dict[str, str]:
    """Return the environment in which the system calls of the save of a step are counted."""
    told = {"BELOW": run_dir / "checkpoints", "FROM": f"step-{step}.tmp", "LOG": log}
    return {"LD_PRELOAD": str(shim), **{f"FAULT_{name}": str(value) for name, value in told.items()}}
