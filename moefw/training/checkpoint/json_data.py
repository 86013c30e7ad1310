"""JSON of checkpoints: one serialisation of a content, and values that are checked as they are read."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final, TypeVar

from moefw.compose.spec.source import show

T = TypeVar("T")
_NAME: Final = re.compile(r"(model|state|optimizer/[^/]+)/.+")


def canonical(content: Mapping[str, Any]) -> bytes:
    """The one serialisation of a content: sorted keys, no spaces, ASCII."""
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode("ascii")


def is_tensor_name(name: str) -> bool:
    """Whether a tensor of a checkpoint may have this name."""
    return bool(_NAME.fullmatch(name)) and name.isprintable()


def item(data: object, key: str, kind: type[T]) -> T:
    """Value of a key of an object. Raises ValueError unless it is of exactly this type."""
    if type(data) is not dict:
        raise ValueError(f"{show(data)} stands where {key} should be")
    if key not in data:
        raise ValueError(f"{key} is missing")
    value = data[key]
    if type(value) is not kind:
        raise ValueError(f"{key} is {show(value)}")
    return value


def count(data: object, key: str) -> int:
    """Number of a key of an object: a natural one of 63 bits. Raises ValueError."""
    value = item(data, key, int)
    if not 0 <= value < 1 << 63:
        raise ValueError(f"{key} is {show(value)}")
    return value


def shape_from(data: object, key: str) -> tuple[int, ...]:
    """Sizes or indices of a key of an object. Raises ValueError."""
    shape = item(data, key, list)
    if not all(type(size) is int and 0 <= size < 1 << 63 for size in shape):
        raise ValueError(f"{key} is {show(shape)}")
    return tuple(shape)
