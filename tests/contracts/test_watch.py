"""State of a part that a suite sees from outside."""

from __future__ import annotations

import itertools
import sys
import types
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moefw.testing.suites.watch import changed, held, held_by_modules


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


def told() -> None:
    """A function of a plugin's package."""


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module ``imaginary.kept``, beside the ``imaginary.plugin`` that declares."""
    kept = types.ModuleType("imaginary.kept")
    own = type("Counted", (), {"_seen": [], "__module__": kept.__name__})
    data = {"number": 1, "tensor": torch.zeros(2), "rows": deque([1]), "next_id": itertools.count()}
    function = types.FunctionType(told.__code__, {"__name__": kept.__name__})
    vars(kept).update(data, Counted=own, told=function, kernel=types.SimpleNamespace(compiled=[]))
    for name in ("imaginary", "imaginary.plugin", "imaginary_other"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, kept.__name__, kept)
    return kept


WRITES: dict[str, tuple[Callable[[Any], object], str]] = {
    "a number": (lambda kept: setattr(kept, "number", 2), "number"),
    "a tensor": (lambda kept: kept.tensor.add_(1), "tensor"),
    "a deque": (lambda kept: kept.rows.append(2), "rows.1"),
    "a counter": (lambda kept: next(kept.next_id), "next_id.next"),
    "data of a class": (lambda kept: kept.Counted._seen.append(1), "Counted._seen.0"),
    "an attribute of a function": (lambda kept: setattr(kept.told, "calls", 1), "told.calls"),
    "a new value": (lambda kept: setattr(kept, "late", 1), "late"),
}


@pytest.mark.parametrize(("write", "path"), WRITES.values(), ids=WRITES)
def test_what_a_module_of_the_package_keeps_is_seen(
    package: types.ModuleType, write: Callable[[Any], object], path: str
) -> None:
    plugin = type("Plugin", (), {"__module__": "imaginary.plugin"})
    before = held_by_modules(plugin)
    assert changed(before, held_by_modules(plugin)) == []
    write(package)
    assert changed(before, held_by_modules(plugin)) == [f"imaginary.kept.{path}"]


def test_another_package_and_its_objects_are_not_looked_at(package: types.ModuleType) -> None:
    plugin = type("Plugin", (), {"__module__": "imaginary.plugin"})
    before = held_by_modules(plugin)
    vars(sys.modules["imaginary_other"])["number"] = 1
    package.kernel.compiled.append("for sm_90")
    assert changed(before, held_by_modules(plugin)) == []
