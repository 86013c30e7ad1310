"""The job that started this process. A run that the same job began goes on, as the job has only come back."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from moefw.compose.assembly import Assembly
from moefw.core.errors import DataError
from moefw.training.folder import is_same_run
from moefw.training.records.events import EVENTS, STARTS, read_events

_NO_ID: Final = "none"
"""What torchrun calls a run to which it was given no ``--rdzv-id``."""


def job_names(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Names of the jobs that this process is part of, by torchrun's ``--rdzv-id`` and Slurm's number; may be empty.

    Both stay when a node joins or a job is requeued. There may be two: torchrun inside a Slurm job, which invents an id
    of its own with ``--standalone``.
    """
    names = []
    run_id = environment.get("TORCHELASTIC_RUN_ID", _NO_ID)
    if run_id != _NO_ID:
        names.append(f"torchrun {run_id}")
    if "SLURM_JOB_ID" in environment:
        names.append(f"Slurm {environment['SLURM_JOB_ID']}")
    return names


def job_to_go_on(assembly: Assembly, environment: Mapping[str, str] = os.environ) -> str:
    """Name of the job of this process that last started the run in ``run.dir``; "" if that was another job.

    Also "" if that run is done or had another spec: then the job begins a new one. torchrun's restart count does not
    tell: an agent counts the failures of its own ranks alone, and a node that joins is none.
    """
    run_dir = Path(assembly.spec.run.dir)
    names = job_names(environment)
    last_names: list[str] = []
    is_done = False
    with suppress(OSError, DataError):  # a folder that cannot be read is no run of ours: run_folder says what it is
        for event in read_events(run_dir / EVENTS):
            if event["event"] in STARTS:
                last_names = event.get("jobs", [])
            is_done = event.get("outcome") == "done"
    shared = [name for name in names if name in last_names]
    if is_done or not shared or not is_same_run(run_dir, assembly):
        return ""
    return shared[0]
