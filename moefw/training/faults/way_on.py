"""How a run whose ranks have failed goes on, added to the problem that is reported."""

from __future__ import annotations

from pathlib import Path

from attrs import evolve

from moefw.core.errors import Problem
from moefw.training.folder import checkpoint_dirs


def with_way_on(problem: Problem, run_dir: Path) -> Problem:
    """Problem whose fix begins with the step that the run in ``run_dir`` goes on from, or says that there is none."""
    saved = checkpoint_dirs(run_dir)
    way_on = "The run has no checkpoint yet: train again without --resume."
    if saved:
        way_on = f"Continue from the checkpoint of step {saved[-1][0]} with --resume."
    return evolve(problem, fix=f"{way_on} {problem.fix}".rstrip())
