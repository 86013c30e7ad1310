"""Runs that a test holds after a step: a schedule, in a distribution of its own, waits while a file is there."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from attrs import frozen

import moefw
from moefw.core.plugin import SchedulePlugin
from small_spec import small_spec


@frozen(kw_only=True)
class Held(SchedulePlugin):
    """The peak learning rate in every step. A step waits while ``folder`` holds a file with its number as name."""

    name: ClassVar[str] = "held"

    folder: str = ""

    def factor(self, step: int, steps: int) -> float:
        """The peak, as soon as the step may begin."""
        while (Path(self.folder) / str(step)).exists():
            time.sleep(0.01)
        return 1.0


@moefw.hookimpl
def moefw_schedules() -> Sequence[type[SchedulePlugin]]:
    return [Held]


def spec(folder: Path, **train: int) -> Path:
    """Write the spec of a small run in ``folder`` that can be held."""
    path = small_spec(folder, **train)
    tree = json.loads(path.read_text())
    tree["train"]["schedule"] = {"use": "held", "folder": str(folder / "hold")}
    path.write_text(json.dumps(tree))
    (folder / "hold").mkdir()
    return path


def environment(folder: Path) -> dict[str, str]:
    """Install the distribution in ``folder`` and return the environment of a run that uses it."""
    info = folder / "site" / "moefw_held-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: moefw-held\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[moefw]\nheld = held_steps\n")
    support = str(Path(__file__).parent)
    path = [os.environ.get("PYTHONPATH"), str(folder / "site"), support]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "OMP_NUM_THREADS": "1",
        "MOEFW_CACHE": str(folder / "cache"),
    }


def hold(folder: Path, step: int) -> None:
    """Let the run in ``folder`` wait after ``step`` steps."""
    (folder / "hold" / str(step)).touch()


def go_on(folder: Path, step: int) -> None:
    """Let the run in ``folder`` go on that waits after ``step`` steps."""
    (folder / "hold" / str(step)).unlink()
