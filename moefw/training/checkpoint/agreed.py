"""Agreement of all ranks on the checkpoint to resume from and on the data."""

from __future__ import annotations

from pathlib import Path

from torch.distributed import ProcessGroup

from moefw.compose.spec.source import show
from moefw.core.data import DataSource
from moefw.core.errors import CheckpointError, PlanError, Problem
from moefw.training.agreement import everywhere, raise_together
from moefw.training.checkpoint.choice import Chosen, choose
from moefw.training.resume import Which


def choose_together(run_dir: Path, which: Which | None, data: DataSource, group: ProcessGroup | None) -> Chosen | None:
    """Return the checkpoint that every rank resumes from, None if all start anew. Collective.

    ``which`` None: this rank was not asked to resume. Raises the first rank's CheckpointError on all ranks, and
    PlanError with the differences if ranks were asked for different checkpoints, or see different checkpoints or data.
    """
    chosen, error = None, None
    try:
        chosen = None if which is None else choose(run_dir, which)
    except CheckpointError as found:
        error = found
    raise_together(error, group)
    own = {
        "what --resume asks for": which,
        "the step to go on from": chosen.step if chosen else 0,
        "the manifest of that checkpoint": chosen.digest if chosen else None,
        "the number of tokens to train on": len(data.train),
        "the prepared data": data.digest,
    }
    told = everywhere(own, group)
    fix = "Let every rank see the same run.dir and the same text, or resume at a step that all have: --resume=N."
    problems = [
        Problem(
            f"rank {rank} differs from rank 0 in {what}: {show(there[what])} instead of {show(told[0][what])}.", fix
        )
        for rank, there in enumerate(told)
        for what in own
        if there[what] != told[0][what]
    ]
    if problems:
        raise PlanError(problems)
    return chosen
