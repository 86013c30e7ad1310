"""The stages of a pipeline: which layers each has, and which position on pp holds it. Pure arithmetic, no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

from moefw.core.errors import PlanError
from moefw.core.plugin import PipelinePlugin
from moefw.core.records import Stage

Stages = tuple[tuple[Stage, ...], ...]
"""The stages of each position on pp."""

_MOST: Final = 2**14
"""Upper limit of the pieces that a layout spells out. More are a mistake."""
_TOKEN: Final = re.compile(r"\s*(?:([EtmL|(),])|\*\s*(\d+))")


def place(pipeline: PipelinePlugin, ranks: int, *, layers: int, further: int) -> Stages:
    """Return the stages of ``layers`` layers, and of ``further`` ones behind that predict further tokens.

    Without a pipeline (``ranks`` 1), all are one stage. Raises PlanError if they do not fill the stages.
    """
    if ranks == 1:
        return ((Stage(0, 1, range(layers + further)),),)
    count = ranks * pipeline.chunks
    if pipeline.layout is None:
        sizes = _evenly(count, layers, further)
    else:
        sizes = _as_written(pipeline.layout, count, layers, further)
    ends = [sum(sizes[: at + 1]) for at in range(count)]
    found = [Stage(at, count, range(end - size, end)) for at, (size, end) in enumerate(zip(sizes, ends, strict=True))]
    return tuple(tuple(one for one in found if pipeline.rank_of(one.index, ranks) == rank) for rank in range(ranks))


def _evenly(count: int, layers: int, further: int) -> list[int]:
    """Return the number of layers of each stage. Larger ones lie in the middle: the ends also embed and predict."""
    if layers < count:
        what = f"num_layers {layers} does not fill {count} pipeline stages, one layer at least each."
        raise PlanError(what, f"Use a smaller pp, or fewer chunks, for at most {layers} in all.")
    size, larger = divmod(layers + further, count)
    inner = [*range(1, count - 1), 0, count - 1][:larger]
    sizes = [size + (at in inner) for at in range(count)]
    if sizes[-1] < further:
        size, larger = divmod(layers, count - 1)
        sizes = [size + (count - 1 - at <= larger) for at in range(count - 1)] + [further]
    return sizes


def _as_written(layout: str, count: int, layers: int, further: int) -> list[int]:
    """Return the number of layers of each stage of a layout."""
    stages = "".join(_spelled(layout)).split("|")
    if len(stages) != count:
        what = f"the layout {layout!r} has {len(stages)} stages, and there are {count}: chunks times pp."
        raise PlanError(what, "Write one | between two stages.")
    wanted, found = f"E{'t' * layers}{'m' * further}L", "".join(stages)
    if found != wanted:
        what = f"the layout {layout!r} spells {_short(found)}, and the model is {_short(wanted)}."
        raise PlanError(what, "Write E, then a t for each layer, an m for each of mtp_layers, and L.")
    empty = [at for at, stage in enumerate(stages) if not stage]
    if empty:
        raise PlanError(f"stage {empty[0]} of the layout {layout!r} is empty.", "Give each stage a piece of the model.")
    return [stage.count("t") + stage.count("m") for stage in stages]


def _short(pieces: str) -> str:
    """Return pieces with repetitions counted, such as ``E t*4 L``."""
    return " ".join(f"{run[0]}*{len(run[0] + run[1])}" if run[1] else run[0] for run in re.findall(r"(.)(\1*)", pieces))


def _spelled(layout: str) -> Iterator[str]:
    """Yield the pieces of a layout and the borders between stages, with repetitions spelled out."""
    tokens, at = list[tuple[str, str]](), 0
    while at < len(layout.rstrip()):
        match = _TOKEN.match(layout, at)
        if match is None:
            raise _unread(layout, f"{layout[at:].strip()[0]!r} is none of E t m L | ( ) * and numbers")
        tokens.append((match[1] or "*", match[2] or ""))
        at = match.end()
    groups: list[list[str]] = [[]]
    for kind, number in tokens:
        if kind == "(":
            groups.append([])
        elif kind == "*":
            if not groups[-1]:
                raise _unread(layout, "there is nothing before * to repeat")
            if len(groups[-1][-1]) * int(number) > _MOST:
                raise _unread(layout, f"it repeats a piece {number} times")
            groups[-1][-1] *= int(number)
        elif kind == ")":
            if len(groups) == 1:
                raise _unread(layout, "a ) closes nothing")
            inner = "".join(groups.pop())
            groups[-1].append(inner)
        elif kind != ",":
            groups[-1].append(kind)
    if len(groups) > 1:
        raise _unread(layout, "a ( is not closed")
    yield from groups[0]


def _unread(layout: str, why: str) -> PlanError:
    return PlanError(f"the layout {layout!r} cannot be read: {why}.", "Write it like E|(t|)*4,m|L.")


def holders(stages: Sequence[Sequence[Stage]], wanted: Sequence[bool]) -> tuple[int, ...]:
    """Return the positions on pp that hold a piece of the model, if several do. ``wanted``: by stage."""
    found = tuple(rank for rank, own in enumerate(stages) if any(wanted[stage.index] for stage in own))
    return found if len(found) > 1 else ()
