"""Stages that refuse a second write: in a run they are frozen to type checkers alone."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, is_dataclass
from typing import Any

from moefw.core import stages


def freeze_stages() -> None:
    """From now on in this process, raise FrozenInstanceError where a field of a stage is replaced or deleted."""
    for stage in vars(stages).values():
        if isinstance(stage, type) and is_dataclass(stage):
            stage.__setattr__ = _write_once  # type: ignore[method-assign]
            stage.__delattr__ = _keep  # type: ignore[method-assign]


def _write_once(self: Any, name: str, value: Any) -> None:
    if hasattr(self, name):
        _refuse(self, name)
    object.__setattr__(self, name, value)


def _keep(self: Any, name: str) -> None:
    _refuse(self, name)


def _refuse(stage: Any, name: str) -> None:
    what = f"{type(stage).__name__}.{name} is replaced, but others hold this {type(stage).__name__}."
    raise FrozenInstanceError(f"{what} Make a new one with dataclasses.replace.")
