"""Checks that suites catch the faults that they must catch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import pytest

from moefw.testing.pool import RankPool
from moefw.testing.profiles import Profile
from moefw.testing.suites.base import Suite


@pytest.fixture
def must_catch(
    moefw_pool: RankPool, moefw_profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., None]]:
    """Expect one test of a suite to fail for a plugin, and to say why.

    Examples are not shrunk and are the same every time, so the result is deterministic.
    """

    def expect(suite: type[Suite], plugin: Any, check: str, says: str, *arguments: Any, **attributes: Any) -> None:
        on_layer_case: Any = type("OnLayerCase", (suite,), {"plugin": plugin, **attributes})()
        on_layer_case.pool, on_layer_case.profile = moefw_pool, moefw_profile
        (name,) = [name for name in dir(on_layer_case) if name.startswith(f"test_{check}")]
        with pytest.raises(AssertionError) as caught:
            getattr(on_layer_case, name)(*arguments)
        assert says in str(caught.value)
        assert str(caught.value).startswith(plugin.name)

    monkeypatch.setenv("CI", "true")
    before = hypothesis.settings.get_current_profile_name()
    hypothesis.settings.register_profile("first", phases=[hypothesis.Phase.generate], report_multiple_bugs=False)
    hypothesis.settings.load_profile("first")
    yield expect
    hypothesis.settings.load_profile(before)
