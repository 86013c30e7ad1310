"""The pytest plugin: fixtures of the contract suites, and options that certify an installed plugin without a test.

Loaded by every pytest in an environment with moefw, so it imports nothing heavy before it is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from moefw.testing.pool import RankPool
    from moefw.testing.suites.base import Profile


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add our options."""
    group = parser.getgroup("moefw")
    group.addoption("--moefw-profile", default="quick", help="how hard contract suites look: quick, ci or nightly")


@pytest.fixture(scope="session")
def moefw_profile(request: pytest.FixtureRequest) -> Profile:
    """How hard contract suites look."""
    from moefw.testing.suites.base import PROFILES

    name = request.config.getoption("--moefw-profile")
    if name not in PROFILES:
        raise pytest.UsageError(f"--moefw-profile {name}: use one of {', '.join(PROFILES)}.")
    return PROFILES[name]


@pytest.fixture(scope="session")
def moefw_pool(moefw_profile: Profile) -> Iterator[RankPool]:
    """As many gloo ranks as the profile asks for, started once."""
    from moefw.testing.pool import RankPool

    ranks = RankPool(max(moefw_profile.worlds))
    yield ranks
    ranks.close()
