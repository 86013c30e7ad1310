"""The values of a resolved spec by their key path, and those in which specs differ."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

OF_A_RUN: Final = "run.dir"
"""The key in which every two runs differ."""
_ABSENT: Final = object()


def differences(specs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Rows of a key and its value in each spec, of the keys in which resolved specs differ, but for ``run.dir``."""
    values_of = [leaves(spec) for spec in specs]
    keys = dict.fromkeys(key for values in values_of for key in values if key != OF_A_RUN)
    rows = []
    for key in keys:
        values = [each.get(key, _ABSENT) for each in values_of]
        if any(value != values[0] for value in values[1:]):
            rows.append([key, *("(absent)" if value is _ABSENT else shown(value) for value in values)])
    return rows


def leaves(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a spec by their key path, such as ``train.lr``; lists of mappings are numbered."""
    return dict(_leaves(spec, ""))


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for place, item in enumerate(value):
            yield from _leaves(item, f"{path}[{place}]")
    else:
        yield path, value


def shown(value: Any) -> str:
    """A value as YAML writes it in a line."""
    return value if isinstance(value, str) else json.dumps(value, default=str)
