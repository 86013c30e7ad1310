"""The tables of suites, which ``moefw plugins --suites`` prints: the attributes that a test class may set."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any, Final

import moefw.testing
from moefw.compose.spec.option_texts import field_texts
from moefw.core.kinds import CERTIFIED

MORE_SUITES: Final = ("OptimizerMemoryPolicySuite",)
"""Suites beside the one of a kind: for memory policies of optimizer states."""


def page() -> Iterator[str]:
    """Yield the tables in lines: attributes of all suites, then those of each suite with more."""
    base = moefw.testing.Suite
    yield from _table("All suites", base)
    suites = {str(kind.suite): PurePosixPath(str(kind.guide)).name for kind in CERTIFIED.values()}
    suites |= dict.fromkeys(MORE_SUITES, suites["MemoryPolicySuite"])
    for name, guide in suites.items():
        suite = getattr(moefw.testing, name)
        if _texts(suite, below=base):
            yield from _table(f"[`{name}`]({guide})", suite, below=base)


def _table(title: str, suite: type[Any], below: type[Any] = object) -> Iterator[str]:
    """Yield a table of the attributes that a suite has beyond those of ``below``."""
    yield f"### {title}"
    yield ""
    yield "| attribute | default | meaning |"
    yield "|---|---|---|"
    for name, text in _texts(suite, below).items():
        default = f"`{getattr(suite, name)!r}`" if hasattr(suite, name) else ""
        yield f"| `{name}` | {default} | {text.replace('``', '`')} |"
    yield ""


def _texts(suite: type[Any], below: type[Any]) -> dict[str, str]:
    """Text of each attribute that a suite declares, or a base of it that is not one of ``below``."""
    bases = [base for base in reversed(suite.__mro__) if base not in below.__mro__]
    texts = {name: text for base in bases for name, text in field_texts(base).items()}
    return {name: text for name, text in texts.items() if not name.startswith("_")}
