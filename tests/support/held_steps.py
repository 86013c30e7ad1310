"""A distribution with a schedule that holds every rank before a step for as long as a file is there."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from attrs import frozen

import moefw
from moefw.core.plugin import SchedulePlugin


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


def install(site: Path) -> Path:
    """Write the metadata of an installed distribution and a link to this file; return the folder for PYTHONPATH."""
    info = site / "moefw_held-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: moefw-held\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[moefw]\nheld = held_steps\n")
    (site / "held_steps.py").symlink_to(__file__)
    return site
