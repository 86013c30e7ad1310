"""What a part promises (offers), what it asks for (needs), and whether they fit. Pure functions."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Generic, TypeVar

from attrs import frozen

from moefw.core.errors import PluginError, Problem, nearest

ANY: Final = "any"
"""An offer that meets every need for a fact, for example every row alignment."""

NONE: Final = "none"
"""Where a number is offered: that there is none."""

Offers = Mapping[str, Any]
Settled = tuple[Any, list[int]]
"""What a fact settles on (None if it cannot), and the positions of the needs that stay unmet."""

Asker = TypeVar("Asker")


@frozen
class Fact:
    """A word that parts agree on.

    ``settle(offered, needed)`` gets what each part offers and what each part needs, in any order. ``asks`` is how an
    error says a need. ``offered_by`` names the sections of a spec that may offer the fact, the machine apart. An
    offer that is ``itemised`` lists items, each about its first word. ``silence`` is what a part of these sections says
    that says nothing; None: it has no say.
    """

    name: str
    asks: str
    settle: Callable[[Sequence[Any], Sequence[Any]], Settled]
    offered_by: tuple[str, ...] = ()
    itemised: bool = False
    silence: Any = None

    def words(self, value: Any) -> str:
        """Return a need as an error says it."""
        return self.asks.format(*(value if self.itemised and isinstance(value, tuple) else [_words(value)]))

    def about(self, offer: Any, value: Any) -> Any:
        """Return the part of an offer that speaks of a needed value."""
        if not self.itemised or offer == ANY:
            return offer
        return tuple(item for item in offer if _subject(item) == _subject(value))


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

    def __attrs_post_init__(self) -> None:
        _look_at(self.fact, self.value)


@frozen
class Misfit(Generic[Asker]):
    """A need that is unmet: nothing offers it, or what is offered went to other needs (``rivals``)."""

    asker: Asker
    need: Need
    offers: tuple[tuple[object, Any], ...]
    rivals: tuple[tuple[Asker, Need], ...]

    def problem(self) -> Problem:
        """Return the sentence that names both parts and the reason, and what to do."""
        need, fact = self.need, FACTS[self.need.fact]
        relevant = [(part, fact.about(offer, need.value)) for part, offer in self.offers]
        relevant = [(part, offer) for part, offer in relevant if offer != ()]
        heard = [f"{part} offers {_words(offer)}" for part, offer in relevant]
        heard += [f"{part} needs {fact.words(other.value)}: {other.reason}" for part, other in self.rivals]
        what = f"{self.asker} needs {fact.words(need.value)}: {need.reason};"
        if not heard:
            known = {str(_subject(item)) for _, offer in self.offers if fact.itemised for item in offer}
            fix = need.fix or nearest(str(_subject(need.value)), known) or f"Change {self.asker}."
            return Problem(f"{what} nothing here offers that.", fix)
        others = " or ".join(str(part) for part, _ in self.rivals or relevant)
        return Problem(f"{what} {', '.join(heard)}.", need.fix or f"Change {self.asker} or {others}.")


def offers(**facts: Any) -> Offers:
    """Return a checked set of promises. Raises PluginError for an unknown fact."""
    for name, value in facts.items():
        _look_at(name, value)
    return facts


def silence(section: str) -> Offers:
    """Return what a part of a section is taken to say of the facts that it does not speak of."""
    return {
        name: fact.silence for name, fact in FACTS.items() if section in fact.offered_by and fact.silence is not None
    }


def need(fact: str, value: Any, *, reason: str, fix: str = "", option: str = "") -> Need:
    """Return a need. Raises PluginError for an unknown fact."""
    return Need(fact, value, reason, fix, option)


def match(
    promises: Iterable[tuple[object, Offers]], demands: Iterable[tuple[Asker, Need]]
) -> tuple[dict[str, Any], list[Misfit[Asker]]]:
    """Settle every fact that is offered. The first item of each pair stands for the part; errors print it."""
    promised = list(promises)
    demanded = list(demands)
    settled: dict[str, Any] = {}
    misfits: list[Misfit[Asker]] = []
    for name, fact in FACTS.items():
        offered = tuple((part, promise[name]) for part, promise in promised if name in promise)
        asked = [(part, demand) for part, demand in demanded if demand.fact == name]
        if offered:
            values = [value for _, value in offered]
            settled[name], unmet = fact.settle(values, [demand.value for _, demand in asked])
        else:
            values, unmet = [], list(range(len(asked)))
        for part, demand in (asked[index] for index in unmet):
            could = offered and not fact.settle(values, [demand.value])[1]
            met = tuple(pair for index, pair in enumerate(asked) if index not in unmet)
            misfits.append(Misfit(part, demand, offered, met if could else ()))
    return settled, misfits


def _choose(
    candidates: Iterable[Any], needed: Sequence[Any], meets: Callable[[Any, Any], bool], cost: Callable[[Any], Any]
) -> Settled:
    """The candidate that meets the most needs; among equals the cheapest."""
    best = min(candidates, key=lambda one: (sum(not meets(one, wanted) for wanted in needed), cost(one)), default=None)
    unmet = [index for index, wanted in enumerate(needed) if best is None or not meets(best, wanted)]
    return None if unmet else best, unmet


def _in_common(offered: Sequence[Any]) -> list[Any] | None:
    """What every offer lists; None if every offer is ANY."""
    lists = [offer for offer in offered if offer != ANY]
    return [item for item in lists[0] if all(item in other for other in lists)] if lists else None


def _multiple(offered: Sequence[Any], needed: Sequence[int]) -> Settled:
    """The smallest number in every offer that is a multiple of every need."""
    common = _in_common(offered)
    candidates = [math.lcm(1, *needed)] if common is None else common
    return _choose(candidates, needed, lambda number, wanted: number % wanted == 0, lambda number: number)


def _one_of(offered: Sequence[Any], needed: Sequence[Sequence[Any]]) -> Settled:
    """The alternative in every offer and every need that stands nearest to the front of the needs, then the offers."""
    common = _in_common(offered)
    candidates = [item for wanted in needed for item in wanted] if common is None else common

    def places(one: Any, lists: Sequence[Any]) -> int:
        return sum(list(each).index(one) for each in lists if each != ANY and one in each)

    def cost(one: Any) -> tuple[int, int, str]:
        return places(one, needed), places(one, offered), str(one)

    return _choose(candidates, needed, lambda one, wanted: one in wanted, cost)


def _some(meets: Callable[[Any, Any], bool]) -> Callable[[Sequence[Any], Sequence[Any]], Settled]:
    """Each need is met by some item of some offer."""

    def settle(offered: Sequence[Any], needed: Sequence[Any]) -> Settled:
        items = tuple(item for offer in offered if offer != ANY for item in offer)
        unmet = (i for i, wanted in enumerate(needed) if not any(meets(item, wanted) for item in items))
        return items, [] if ANY in offered else list(unmet)

    return settle


def _given(offered: Sequence[Any], needed: Sequence[Any]) -> Settled:
    """The number that every offer names; a need asks that there be one."""
    numbers = [item for item in _in_common(offered) or () if item != NONE]
    return numbers[0] if numbers else None, [] if numbers else list(range(len(needed)))


def _divides(axis: tuple[str, int], wanted: tuple[str, int]) -> bool:
    return axis[0] == wanted[0] and wanted[1] % axis[1] == 0


def _all_true(offered: Sequence[bool], needed: Sequence[bool]) -> Settled:
    """True only if every offer is true."""
    value = all(offered)
    return value, [index for index, wanted in enumerate(needed) if wanted and not value]


_COMPUTING = ("model", "routing", "dispatch", "gemm", "precision")

FACTS: Final[Mapping[str, Fact]] = {
    fact.name: fact
    for fact in (
        # rows of an expert's group are a multiple of this
        Fact("row_alignment", "rows aligned to {}", _multiple, ("dispatch",)),
        # ragged: groups end to end; padded: groups of equal size; static: size known beforehand
        Fact("rows", "{} rows", _one_of, ("dispatch",)),
        # static rows as a multiple of a balanced rank's: a step that overflows them is run again without the budget
        Fact("budget", "a budget of rows that a second run lifts", _given, ("dispatch",), silence=(NONE,)),
        # the format in which a GEMM gets its operands, and in which rows travel
        Fact("operand", "{} operands", _one_of, ("precision",)),
        Fact("wire", "{} rows on the wire", _one_of, ("precision",)),
        # where the numbers of rows per expert are known: host, device
        Fact("counts", "counts on the {}", _one_of, ("dispatch",)),
        # axes of the layout: that exist, and (axis, size) whose size divides a number
        Fact("axis", "axis {}", _some(operator.eq), ("parallel",), itemised=True),
        Fact("axis_divides", "a size of axis {} that divides {}", _some(_divides), ("parallel",), itemised=True),
        # axes along which a model can be split
        Fact("split", "a model that is split along {}", _some(operator.eq), ("model",), itemised=True),
        # how many different token ids a model takes
        Fact("token_ids", "{} token ids", _some(operator.ge), ("model",), silence=ANY),
        # the set of tokens that routing looks at: token, sequence, micro_batch, global_batch
        Fact("partition", "routing that looks at one {}", _one_of, ("routing",)),
        # (region, treatment) pairs that memory policies may use
        Fact("region", "region {} to allow {}", _some(operator.eq), ("model", "gemm", "optimizer"), itemised=True),
        Fact("differentiable", "gradients through every part", _all_true, _COMPUTING),
        Fact("deterministic", "the same bits from every part in two runs", _all_true, _COMPUTING),
        # a second movement may start before the first has come back
        Fact("two_in_flight", "two movements in flight", _all_true, ("dispatch",)),
        # products go through moefw.linear, or quantize for each pass of backward themselves
        Fact("by_pass", "operands quantized for each pass", _all_true, ("model", "gemm"), silence=False),
        # what backward reads of activations is saved through Precision.keep_activation
        Fact("activations_kept", "activations that a recipe may save as codes", _all_true, ("gemm",), silence=False),
        # a key of its token comes with every row that an expert or a linear layer gets, if the recipe draws
        Fact("row_keys", "a key with each row", _all_true, ("model", "dispatch", "gemm"), silence=False),
        # what the machine has
        Fact("device", "device {}", _one_of),
        Fact("capability", "compute capability {}", _one_of),
        Fact("package", "package {}", _some(operator.eq), itemised=True),
    )
}


def _look_at(name: str, value: Any) -> None:
    if name not in FACTS:
        raise PluginError(f"{name!r} is not a fact that parts agree on.", nearest(name, FACTS))
    if FACTS[name].settle is _one_of and isinstance(value, str) and value != ANY:
        raise PluginError(f"fact {name} takes a tuple of alternatives, not {value!r}.", f"Write ({value!r},).")
    str(value)  # one that rests on an option that could not be read fails here, inside the part that says it


def _subject(item: Any) -> Any:
    return item[0] if isinstance(item, tuple) else item


def _words(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple | list):
        return " or ".join("=".join(map(str, item)) if isinstance(item, tuple) else str(item) for item in value)
    return str(value)
