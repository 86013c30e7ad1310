"""Candidates: settings of a spec with what they would take, or why they are none. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from attrs import frozen

from moefw.planner.time.likeness import Inputs
from moefw.planner.time.step import StepTime
from moefw.planner.tune.settings import Settings

FITS: Final = "fit"
DOES_NOT_FIT: Final = "do not fit"
REFUSED: Final = "refused by check"
NOT_IN_SOFTWARE: Final = "not in the software"
NOT_MULTIPLIED: Final = "in formats that these GPUs do not multiply"
NOT_MEASURABLE: Final = "not measurable here"
OUTCOMES: Final = (FITS, DOES_NOT_FIT, REFUSED, NOT_IN_SOFTWARE, NOT_MULTIPLIED, NOT_MEASURABLE)


@frozen(kw_only=True)
class Candidate:
    """Settings, and the time and peak of a step with them. ``label``: the settings in words.

    ``problems``: why ``check`` refuses them, which parts the software lacks, why GPUs do not multiply its formats, or
    why they cannot be measured; then nothing else is known. ``problems_are``: which of these.
    ``complexity``: the parallel dimensions and policies in use. ``position``: the one on pp that needs most memory.
    ``sizes``: of the layout. ``inputs``: what of it published rows are like or unlike in, if its time is known.
    """

    settings: Settings
    label: str
    problems: tuple[str, ...] = ()
    problems_are: str = NOT_MEASURABLE
    step: StepTime | None = None
    inputs: Inputs | None = None
    peak_bytes: int | None = None
    left_bytes: int | None = None
    position: int = 0
    complexity: int = 0
    sizes: Mapping[str, int] = {}
    tokens_per_s_per_gpu: float = 0.0

    @property
    def fits(self) -> bool:
        """Whether the peak fits a GPU."""
        return self.left_bytes is not None and self.left_bytes >= 0

    @property
    def outcome(self) -> str:
        """What came of it, as searches count it."""
        if self.problems:
            return self.problems_are
        return FITS if self.fits else DOES_NOT_FIT

    @property
    def step_s(self) -> float:
        """Seconds of a step; infinity: unknown."""
        return float("inf") if self.step is None else self.step.step_s

    @property
    def missing_bytes(self) -> int:
        """Bytes by which the peak does not fit."""
        return max(0, -(self.left_bytes or 0))

    def to_data(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "label": self.label,
            "settings": {".".join(map(str, path)): value for path, value in self.settings.items()},
            "problems": list(self.problems),
            "step_time_s": None if self.step is None else self.step.step_s,
            "seconds": None if self.step is None else dict(self.step.categories),
            "added_seconds": None if self.step is None else dict(self.step.added_s),
            "tokens_per_s_per_gpu": self.tokens_per_s_per_gpu,
            "peak_bytes": self.peak_bytes,
            "left_bytes": self.left_bytes,
            "fits": self.fits,
            "layout": dict(self.sizes),
        }
