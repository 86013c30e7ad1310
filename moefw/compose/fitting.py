"""Matches the offers and needs of parts, and words the reason of each misfit. Pure functions."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Final, Generic, TypeVar

from attrs import frozen

from moefw.core.errors import PluginError, Problem, nearest
from moefw.core.facts import ANY, FACTS, Fact, Need, Offers, Rule, offers

Settled = tuple[Any, list[int]]
"""The value that a fact settles on (None if it cannot), and the positions of the needs that stay unmet."""

Asker = TypeVar("Asker")


@frozen
class Misfit(Generic[Asker]):
    """An unmet need: no offer meets it, or the offers settle on a value for other needs (``rivals``)."""

    asker: Asker
    need: Need
    offers: tuple[tuple[object, Any], ...]
    rivals: tuple[tuple[Asker, Need], ...]

    def problem(self) -> Problem:
        """Problem, which names the parts, the reason and a fix."""
        need = self.need
        fact = FACTS[need.fact]
        relevant = [(part, _about(fact, offer, need.value)) for part, offer in self.offers]
        relevant = [(part, offer) for part, offer in relevant if offer != ()]
        # If some offers fail the need by themselves, the others have no part in it.
        failing = [(part, offer) for part, offer in relevant if RULES[fact.rule]([offer], [need.value])[1]]
        relevant = failing or relevant
        heard = [f"{part} offers {_words(offer)}" for part, offer in relevant]
        heard += [f"{part} needs {_asked(fact, other.value)}: {other.reason}" for part, other in self.rivals]
        what = f"{self.asker} needs {_asked(fact, need.value)}: {need.reason};"
        if not heard:
            known = {str(_subject(item)) for _, offer in self.offers if fact.itemised for item in offer}
            fix = need.fix or nearest(str(_subject(need.value)), known) or f"Change {self.asker}."
            return Problem(f"{what} nothing here offers that.", fix)
        others = " or ".join(str(part) for part, _ in self.rivals or relevant)
        return Problem(f"{what} {', '.join(heard)}.", need.fix or f"Change {self.asker} or {others}.")


def silence(section: str) -> Offers:
    """Default offers of a part of a section, for facts that it does not state."""
    return {
        name: fact.silence for name, fact in FACTS.items() if section in fact.offered_by and fact.silence is not None
    }


def offers_of(section: str, stated: Offers) -> Offers:
    """Offers of a part of a section, checked. Raises PluginError for a fact that others offer."""
    for name in offers(**stated):
        if section not in FACTS[name].offered_by:
            whose = " or ".join(FACTS[name].offered_by) or "the machine"
            raise PluginError(f"fact {name} is offered by {whose}, not by {section}.", "Leave it out.")
    return stated


def match(
    promises: Iterable[tuple[object, Offers]], demands: Iterable[tuple[Asker, Need]]
) -> tuple[dict[str, Any], list[Misfit[Asker]]]:
    """Settle every fact that is offered, and return the values and misfits.

    The first item of each pair identifies the part. Errors print it.
    """
    offered_of: dict[str, list[tuple[object, Any]]] = {}
    for part, promise in promises:
        for name, value in promise.items():
            offered_of.setdefault(name, []).append((part, value))
    asked_of: dict[str, list[tuple[Asker, Need]]] = {}
    for asker, demand in demands:
        asked_of.setdefault(demand.fact, []).append((asker, demand))
    settled: dict[str, Any] = {}
    misfits: list[Misfit[Asker]] = []
    for name, fact in FACTS.items():
        if name not in offered_of and name not in asked_of:
            continue
        offered = tuple(offered_of.get(name, ()))
        asked = asked_of.get(name, [])
        values = [value for _, value in offered]
        unmet = list(range(len(asked)))
        if offered:
            settled[name], unmet = RULES[fact.rule](values, [demand.value for _, demand in asked])
        met = tuple(pair for index, pair in enumerate(asked) if index not in unmet)
        for part, demand in (asked[index] for index in unmet):
            # A need that the offers could meet alone is unmet because of the others, which are its rivals.
            is_met_alone = offered and not RULES[fact.rule](values, [demand.value])[1]
            misfits.append(Misfit(part, demand, offered, met if is_met_alone else ()))
    return settled, misfits


def _choose(
    candidates: Iterable[Any], needed: Sequence[Any], meets: Callable[[Any, Any], bool], cost: Callable[[Any], Any]
) -> Settled:
    """Candidate that meets the most needs; among equals, the cheapest."""

    def rank(candidate: Any) -> tuple[int, Any]:
        num_unmet = sum(not meets(candidate, need) for need in needed)
        return num_unmet, cost(candidate)

    best = min(candidates, key=rank, default=None)
    unmet = [index for index, need in enumerate(needed) if best is None or not meets(best, need)]
    return None if unmet else best, unmet


def _in_common(offered: Sequence[Any]) -> list[Any] | None:
    """Items that every offer lists; None if every offer is ANY."""
    lists = [offer for offer in offered if offer != ANY]
    return [item for item in lists[0] if all(item in other for other in lists)] if lists else None


def _multiple(offered: Sequence[Any], needed: Sequence[int]) -> Settled:
    """Smallest number in every offer that is a multiple of every need."""
    common = _in_common(offered)
    candidates = [math.lcm(1, *needed)] if common is None else common
    return _choose(candidates, needed, lambda number, divisor: number % divisor == 0, lambda number: number)


def _one_of(offered: Sequence[Any], needed: Sequence[Sequence[Any]]) -> Settled:
    """Alternative in every offer and every need that ranks first in the needs, then in the offers."""
    common = _in_common(offered)
    candidates = [item for alternatives in needed for item in alternatives] if common is None else common

    def places(item: Any, lists: Sequence[Any]) -> int:
        """Sum of the positions of an alternative in lists that rank it."""
        return sum(list(ranked).index(item) for ranked in lists if ranked != ANY and item in ranked)

    def cost(item: Any) -> tuple[int, int, str]:
        return places(item, needed), places(item, offered), str(item)

    return _choose(candidates, needed, lambda item, alternatives: item in alternatives, cost)


def _some(meets: Callable[[Any, Any], bool]) -> Callable[[Sequence[Any], Sequence[Any]], Settled]:
    """Rule under which a need is met by any item of any offer."""

    def settle(offered: Sequence[Any], needed: Sequence[Any]) -> Settled:
        items = tuple(item for offer in offered if offer != ANY for item in offer)
        if ANY in offered:
            return items, []
        return items, [index for index, need in enumerate(needed) if not any(meets(item, need) for item in items)]

    return settle


def _divides(offered: tuple[str, int], needed: tuple[str, int]) -> bool:
    """Whether an axis ``(name, ranks)`` is the one needed, and its ranks divide the size ``(name, size)``."""
    axis, ranks = offered
    needed_axis, size = needed
    return axis == needed_axis and size % ranks == 0


def _is_like(offered: str, needed: str) -> bool:
    """Whether a name matches a pattern."""
    return fnmatchcase(offered, needed)


def _all_true(offered: Sequence[bool], needed: Sequence[bool]) -> Settled:
    """Return True only if every offer is true."""
    value = all(offered)
    return value, [index for index, is_needed in enumerate(needed) if is_needed and not value]


RULES: Final[Mapping[Rule, Callable[[Sequence[Any], Sequence[Any]], Settled]]] = {
    "multiple": _multiple,
    "one of": _one_of,
    "some": _some(operator.eq),
    "some at least": _some(operator.ge),
    "some dividing": _some(_divides),
    "some like": _some(_is_like),
    "all": _all_true,
}
"""By rule: a function of the values that parts offer and of those that parts need, each in any order."""


def _asked(fact: Fact, value: Any) -> str:
    """Wording of a need in an error, on one line whatever is needed."""
    asked = fact.asks.format(*(value if fact.itemised and isinstance(value, tuple) else [_words(value)]))
    return asked.replace("\n", "\\n")


def _about(fact: Fact, offer: Any, value: Any) -> Any:
    """Items of an offer that concern a needed value."""
    if not fact.itemised or offer == ANY:
        return offer
    return tuple(item for item in offer if _subject(item) == _subject(value))


def _subject(item: Any) -> Any:
    return item[0] if isinstance(item, tuple) else item


def _words(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple | list):
        return " or ".join("=".join(map(str, item)) if isinstance(item, tuple) else str(item) for item in value)
    return str(value)
