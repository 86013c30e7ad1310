"""The subjects of a page: functions from runs and ``Charts`` to a ``Section``, or None if it does not concern them."""

from __future__ import annotations

from collections.abc import Sequence

from moefw.report.blocks import Section
from moefw.report.charts import Charts
from moefw.report.reading import Run
from moefw.report.sections import (
    comparing,
    drops,
    experts,
    gradients,
    happened,
    layout,
    loss,
    memory,
    others,
    outcome,
    planned,
    sample,
    settings,
    speed,
)


def sections_of(runs: Sequence[Run], charts: Charts) -> list[Section]:
    """Sections of a page about runs, in the order in which a reader needs them."""
    made = [subject(runs, charts) for subject in SUBJECTS]
    return [section for section in made if section is not None]


SUBJECTS = (
    outcome.section,
    comparing.results,
    comparing.differences,
    loss.section,
    speed.speed,
    speed.step_time,
    planned.section,
    experts.load,
    experts.entropy,
    drops.section,
    gradients.section,
    others.section,
    memory.section,
    layout.section,
    happened.section,
    settings.section,
    sample.section,
)
