"""The pytest plugin: fixtures of the contract suites, and options to certify an installed plugin without a test file.

Every pytest in an environment with moefw loads it, so it imports heavy modules only on use.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from moefw.core.kinds import CERTIFIED
from moefw.testing import profiles

if TYPE_CHECKING:
    from moefw.testing.pool import RankPool

_NAMED = pytest.StashKey[Any]()
CERTIFY = Path(__file__).with_name("certify.py")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add our options."""
    group = parser.getgroup("moefw", "certify plugins of moefw")
    group.addoption(
        "--moefw-profile", default="quick", help=f"how hard contract suites look: {', '.join(profiles.PROFILES)}"
    )
    for kind in CERTIFIED.values():
        group.addoption(
            kind.option, metavar="NAME", help=f"certify the installed {kind.noun} NAME; no test file needed"
        )
    group.addoption("--moefw-options", metavar="YAML", help="what a spec says beside `use:`, as in '{backend: torch}'")


def pytest_configure(config: pytest.Config) -> None:
    """Find the plugins to certify, before collection."""
    config.addinivalue_line(
        "markers", f"{profiles.smoke.name}: a check of a contract suite that --moefw-profile smoke runs"
    )
    profile = config.getoption("--moefw-profile")
    if profile not in profiles.PROFILES:
        raise pytest.UsageError(f"--moefw-profile {profile}: use one of {', '.join(profiles.PROFILES)}.")
    if config.getoption("--moefw-options") or any(config.getoption(kind.option) for kind in CERTIFIED.values()):
        from moefw.testing.certify import candidates

        config.stash[_NAMED] = candidates(config)
        if config.args_source is not pytest.Config.ArgsSource.ARGS:
            config.args[:] = []
        config.args.append(str(CERTIFY))


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Collect the suites of the named plugins in place of our own file."""
    named = parent.config.stash.get(_NAMED, None)
    if named is None or module_path != CERTIFY:
        return None
    from moefw.testing.certify import Certificate

    certificate: Certificate = Certificate.from_parent(parent, path=module_path, nodeid="moefw")
    certificate.named = named
    return certificate


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what the profile leaves out of suites. Raises UsageError for a suite of which it leaves nothing."""
    profile = config.getoption("--moefw-profile")
    only = profiles.PROFILES[profile].only
    if only is None or "moefw.testing.suites.base" not in sys.modules:
        return
    from moefw.testing.suites.base import Suite

    checks = [item for item in items if isinstance(item, pytest.Function) and issubclass(item.cls or object, Suite)]
    for suite in {check.cls for check in checks}:
        if not _has_checks_with(only, suite):
            raise pytest.UsageError(f"--moefw-profile {profile}: {suite.__name__} has no checks for it. Use quick.")
    left_out = [check for check in checks if check.get_closest_marker(only.name) is None]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def _has_checks_with(mark: pytest.MarkDecorator, suite: type) -> bool:
    checks = [getattr(suite, name) for name in dir(suite) if name.startswith("test_")]
    return any(mark.mark in getattr(check, "pytestmark", ()) for check in checks)


def pytest_collection_finish() -> None:
    """Freeze stages. Exclude imported objects from garbage collection, as suites often collect to count tensors."""
    if "moefw.testing.suites.base" in sys.modules:
        from moefw.testing.frozen_stages import freeze_stages

        freeze_stages()
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session")
def moefw_profile(request: pytest.FixtureRequest) -> profiles.Profile:
    """Profile of the contract suites: world sizes and number of examples."""
    return profiles.PROFILES[request.config.getoption("--moefw-profile")]


@pytest.fixture(scope="session")
def moefw_counted_pool() -> Iterator[RankPool]:
    """Yield two gloo ranks, started once, in which the counted device of ``moefw.testing.host_waits`` may stay."""
    from moefw.testing.pool import RankPool

    ranks = RankPool(2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def moefw_pool(moefw_profile: profiles.Profile) -> Iterator[RankPool]:
    """Yield a pool of gloo ranks for the profile's largest world, started once."""
    from moefw.testing.pool import RankPool

    ranks = RankPool(max(moefw_profile.worlds))
    yield ranks
    ranks.close()
