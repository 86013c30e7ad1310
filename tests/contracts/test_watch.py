"""State of a part that a suite sees from outside."""

from __future__ import annotations

import types

import pytest

from moefw.testing.suites.watch import changed, held


@pytest.mark.parametrize("name", ["first", "second", "third"])
def test_a_member_of_any_set_is_seen(name: str) -> None:
    part = types.SimpleNamespace(first={1}, second={2}, third={3})
    before = held(part)
    getattr(part, name).add(4)
    assert changed(before, held(part)) == [f"{name}.members.1"]


class Counting:
    count = 0


def test_a_value_of_a_part_that_hides_one_of_its_class_is_seen() -> None:
    part = Counting()
    before = held(part)
    part.count += 1
    assert changed(before, held(part)) == ["count"]
