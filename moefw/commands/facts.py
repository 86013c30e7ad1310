"""The page of facts, which ``moefw plugins --facts`` prints: the words of ``offers`` and ``needs``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from moefw.core.facts import ANY, FACTS, MEANINGS, Fact, Rule

HEAD = """# Facts

The words that `offers` and `needs` of a plugin may use. Written by `moefw plugins --facts` from
[`moefw/core/facts.py`](../../moefw/core/facts.py); a test compares.

`moefw.offers(rows=("ragged", "padded"))` offers, `moefw.need("rows", ("ragged",), reason=...)` needs. Parts of the
sections under *offered by* offer a fact, any part may need it. Such a part that does not mention it offers what stands
under *unsaid*. Needs of a fact that nothing offers are unmet. `context.facts[FACT]`, in `build`, is the value on which
the parts of a layer agree.
"""

SETTLED: Final[Mapping[Rule, tuple[str, str, str]]] = {
    "multiple": (
        "a tuple of numbers, or `moefw.ANY`",
        "a number",
        "a number in every offer is a multiple of all needs; the smallest is taken",
    ),
    "one of": (
        "a tuple, or `moefw.ANY`",
        "a tuple",
        "an alternative is in every offer and every need; the first in the needs is taken, then in the offers",
    ),
    "given": ("a tuple of one number", "any value", "there is a number"),
    "some": ("a tuple of items", "an item", "some offer has the item"),
    "some at least": ("a tuple of one number", "a number", "some offer is at least as large"),
    "some dividing": ("a tuple of pairs", "a pair", "the axis has a size that divides the number"),
    "sum": ("a number", "a number", "the sum of all offers is at most as large"),
    "all": ("`True` or `False`", "`True`", "every part offers `True`"),
}
"""By rule: what an offer is, what a need is, and when they fit."""


def page() -> Iterator[str]:
    """Yield docs/guides/facts.md in pieces, which newlines join."""
    yield HEAD
    yield "| fact | offered by | rule | values | unsaid |\n|---|---|---|---|---|"
    for name, fact in FACTS.items():
        sections = ", ".join(fact.offered_by) or "the machine"
        yield f"| `{name}` | {sections} | {fact.rule} | {MEANINGS[name]} | {_unsaid(fact)} |"
    yield "\n| rule | an offer is | a need is | they fit if |\n|---|---|---|---|"
    for rule, words in SETTLED.items():
        yield f"| {rule} | {' | '.join(words)} |"


def _unsaid(fact: Fact) -> str:
    if fact.silence is None:
        return ""
    return "`moefw.ANY`" if fact.silence == ANY else f"`{fact.silence}`"
