"""What a part promises (offers), what it asks for (needs), and whether they fit. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from attrs import frozen

from moefw.core.errors import PluginError, nearest

ANY: Final = "any"
"""An offer that meets every need for a fact, for example every row alignment."""

Offers = Mapping[str, Any]


@frozen
class Fact:
    """A word that parts agree on.

    ``settle(offered, needed)`` gets what each part offers and what each part needs, and returns the settled
    value and the needs that cannot be met, as their positions in ``needed``.
    """

    name: str
    meaning: str
    settle: Callable[[Sequence[Any], Sequence[Any]], tuple[Any, list[int]]]
    adds_up: bool = False
    """Whether one more part that offers it could meet a need that the others do not."""


@frozen
class Need:
    """What a part asks of the others: a fact, the value that is needed, and the reason that an error prints.

    ``option`` is the key of the asking part that the user may change, for the error's place.
    """

    fact: str
    value: Any
    reason: str
    fix: str = ""
    option: str = ""


@frozen
class Misfit:
    """A need that nobody meets."""

    asker: str
    need: Need
    offers: tuple[tuple[str, Any], ...]

    @property
    def may_be_met_elsewhere(self) -> bool:
        """Whether a part that could not be loaded might have met the need."""
        return not self.offers or FACTS[self.need.fact].adds_up

    def what(self) -> str:
        """Return the sentence that names both parts and the reason."""
        wanted = f"{self.asker} needs {_words(self.need.fact)} {_show(self.need.value)}: {self.need.reason};"
        if not self.offers:
            return f"{wanted} nothing here offers {_words(self.need.fact)}."
        offered = ", ".join(f"{part} offers {_show(value)}" for part, value in self.offers)
        return f"{wanted} {offered}."


def offers(**facts: Any) -> Offers:
    """Return a checked set of promises. Raises PluginError for an unknown fact."""
    for name in facts:
        _known(name)
    return facts


def need(fact: str, value: Any, *, reason: str, fix: str = "", option: str = "") -> Need:
    """Return a checked need. Raises PluginError for an unknown fact."""
    _known(fact)
    return Need(fact, value, reason, fix, option)


def match(
    promises: Iterable[tuple[str, Offers]], demands: Iterable[tuple[str, Need]]
) -> tuple[dict[str, Any], list[Misfit]]:
    """Settle every fact that is offered or needed. Parts are named by the first item of each pair."""
    promised = list(promises)
    demanded = list(demands)
    settled: dict[str, Any] = {}
    misfits: list[Misfit] = []
    for name, fact in FACTS.items():
        offered = [(part, promise[name]) for part, promise in promised if name in promise]
        needed = [(part, demand) for part, demand in demanded if demand.fact == name]
        if not offered:
            unmet = list(range(len(needed)))
        else:
            value, unmet = fact.settle([value for _, value in offered], [demand.value for _, demand in needed])
            settled[name] = value
        misfits += [Misfit(needed[index][0], needed[index][1], tuple(offered)) for index in unmet]
    return settled, misfits


def _multiple(offered: Sequence[Any], needed: Sequence[int]) -> tuple[Any, list[int]]:
    """The least common multiple of the needs, if every offer is ANY or lists it."""
    multiple = math.lcm(1, *needed)
    if all(offer == ANY or multiple in offer for offer in offered):
        return multiple, []
    return None, [i for i, value in enumerate(needed) if any(o != ANY and value not in o for o in offered)] or [0]


def _one_of(offered: Sequence[Any], needed: Sequence[Sequence[Any]]) -> tuple[Any, list[int]]:
    """The first alternative that everybody can live with; needs list theirs in order of preference."""
    everywhere = [a for a in offered[0] if all(a in offer for offer in offered)]
    for alternative in needed[0] if needed else everywhere:
        if alternative in everywhere and all(alternative in wanted for wanted in needed):
            return alternative, []
    unmet = [i for i, wanted in enumerate(needed) if not set(wanted) & set(everywhere)]
    return None, unmet or list(range(len(needed)))[-1:]


def _contains(offered: Sequence[Any], needed: Sequence[Any]) -> tuple[Any, list[int]]:
    """Every need is an item of some offer."""
    union = [item for offer in offered for item in offer]
    return tuple(union), [i for i, value in enumerate(needed) if value not in union]


def _divides(offered: Sequence[Mapping[str, int]], needed: Sequence[tuple[str, int]]) -> tuple[Any, list[int]]:
    """The size of the axis (first item of the need) divides the number (second item)."""
    sizes: dict[str, int] = {axis: size for offer in offered for axis, size in offer.items()}
    unmet = [i for i, (axis, number) in enumerate(needed) if axis not in sizes or number % sizes[axis]]
    return sizes, unmet


def _flag(offered: Sequence[bool], needed: Sequence[bool]) -> tuple[Any, list[int]]:
    """True only if every offer is True."""
    value = all(offered)
    return value, [i for i, wanted in enumerate(needed) if wanted and not value]


FACTS: Final[Mapping[str, Fact]] = {
    fact.name: fact
    for fact in (
        Fact("row_alignment", "rows of an expert's group are a multiple of this", _multiple),
        Fact("rows", "ragged: groups end to end; padded: groups of equal size; static: size known beforehand", _one_of),
        Fact("operand", "the format in which a GEMM gets its operands", _one_of),
        Fact("wire", "the format in which rows travel", _one_of),
        Fact("counts", "where the numbers of rows per expert are known: host, device", _one_of),
        Fact("axis", "axes of the layout that exist", _contains, adds_up=True),
        Fact("axis_divides", "an axis whose size divides a number", _divides),
        Fact("partition", "the set of tokens that routing looks at: token, sequence, micro_batch, global_batch", _one_of),
        Fact("region", "(region, treatment) pairs that memory policies may use", _contains, adds_up=True),
        Fact("differentiable", "gradients flow through", _flag),
        Fact("deterministic", "two runs give the same bits", _flag),
        Fact("two_in_flight", "a second movement may start before the first has come back", _flag),
        Fact("device", "kinds of device it runs on", _one_of),
        Fact("package", "importable packages", _contains, adds_up=True),
    )
}


def _known(name: str) -> None:
    if name not in FACTS:
        raise PluginError(f"{name!r} is not a fact that parts agree on.", nearest(name, FACTS))


def _words(name: str) -> str:
    return name.replace("_", " ")


def _show(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={item}" for key, item in value.items())
    if isinstance(value, tuple | list | frozenset | set):
        return " or ".join(" ".join(map(str, v)) if isinstance(v, tuple) else str(v) for v in value)
    return str(value)
