"""Profiles of the contract suites: how hard they look. No torch here, as every pytest imports it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import pytest
from attrs import frozen

smoke: Final = pytest.mark.moefw_smoke
"""Marks a check of a suite for the profile of this name: one that costs little and catches much."""


@frozen
class Profile:
    """Effort of a suite: the world sizes, the number of drawn examples per check, and whether each run draws others.

    ``only`` is the mark of the checks that run; None: all run.
    """

    worlds: tuple[int, ...]
    examples: int
    new_draws: bool = False
    only: pytest.MarkDecorator | None = None


PROFILES: Final[Mapping[str, Profile]] = {
    "smoke": Profile(worlds=(2,), examples=1, only=smoke),
    "quick": Profile(worlds=(1, 2, 3, 4), examples=12),
    "ci": Profile(worlds=(1, 2, 3, 4), examples=60),
    "nightly": Profile(worlds=(1, 2, 3, 4, 6, 8), examples=600, new_draws=True),
}
