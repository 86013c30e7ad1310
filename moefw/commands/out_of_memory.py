"""Note for a run that is out of memory: the planned memory of a rank, and the memory of the machine."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from moefw.commands.doctor.machine import usable_bytes
from moefw.compose.assembly import Assembly
from moefw.planner import Ledger
from moefw.planner.sheets import unit_for
from moefw.system.python import python

LARGEST = 3
"""Number of categories that are named."""

TIMEOUT_S = 60.0
"""Seconds after which the note goes without a plan."""


def memory_note(assembly: Assembly) -> str:
    """Largest categories of a rank's plan, its peak, and the memory of this machine."""
    plan = _planned(assembly)
    if plan is None or plan.peak_bytes is None:
        return f"This machine has {_told(usable_bytes())} of memory."
    held = plan.held
    categories = {
        "parameters": held.parameters,
        "gradients": held.gradients,
        "optimizer states": held.optimizer + held.host,
        "saved for backward": plan.totals["saved"],
        "buffers and tokens": held.buffers + held.batch,
        "pools of policies": plan.pools,
    }
    largest = sorted(categories, key=lambda name: -categories[name])[:LARGEST]
    parts = ", ".join(f"{name} {_told(categories[name])}" for name in largest)
    said = f"The plan of {plan.ranks}: {parts}; {_told(plan.peak_bytes)} at the peak."
    if assembly.site.machine.device != "cpu":
        return f"{said} See `moefw plan`."
    return f"{said} This machine has {_told(usable_bytes())} for all of them. See `moefw plan`."


def _planned(assembly: Assembly) -> Ledger | None:
    """Plan of the run's own spec, made by another process: this one may be a rank, or have no torch."""
    spec = Path(assembly.spec.run.dir) / "spec.yaml"
    world = str(assembly.layout.world)
    command = python("-m", "moefw", "plan", str(spec), "--world", world, "--json")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return Ledger.of_data(json.loads(done.stdout))


def _told(num_bytes: int) -> str:
    unit, name = unit_for(num_bytes)
    return f"{num_bytes / unit:.1f} {name}"
