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
    """Stages of ``layers`` layers, and of ``further`` ones behind that predict further tokens.

    Without a pipeline (``ranks`` 1), all are one stage. Raises PlanError if they do not fill the stages.
    """
    if ranks == 1:
        return ((Stage(0, 1, range(layers + further)),),)
    count = ranks * pipeline.chunks
    if pipeline.layout is None:
        sizes = _evenly(count, layers, further)
    else:
        sizes = _as_written(pipeline.layout, count, layers, further)
    stages: list[Stage] = []
    first_layer = 0
    for index, size in enumerate(sizes):
        stages.append(Stage(index=index, count=count, layers=range(first_layer, first_layer + size)))
        first_layer += size
    return tuple(
        tuple(stage for stage in stages if pipeline.rank_of(stage.index, ranks) == rank) for rank in range(ranks)
    )


def _evenly(count: int, layers: int, further: int) -> list[int]:
    """Number of layers of each stage. Larger ones lie in the middle: the ends also embed and predict.

    All ``further`` layers are in the last stage, which is larger than the others if it must be.
    """
    if layers < count:
        problem = f"num_layers {layers} does not fill {count} pipeline stages, one layer at least each."
        raise PlanError(problem, f"Use a smaller pp, or fewer chunks, for at most {layers} in all.")
    size, num_larger = divmod(layers + further, count)
    sizes = [size] * count
    middle_first = [*range(1, count - 1), 0, count - 1]
    for index in middle_first[:num_larger]:
        sizes[index] += 1
    if sizes[-1] >= further:
        return sizes
    size, num_larger = divmod(layers, count - 1)
    sizes = [size] * (count - 1)
    for index in range(count - 1 - num_larger, count - 1):
        sizes[index] += 1
    return [*sizes, further]


def _as_written(layout: str, count: int, layers: int, further: int) -> list[int]:
    """Number of layers of each stage of a layout."""
    stages = "".join(_spelled(layout)).split("|")
    if len(stages) != count:
        problem = f"the layout {layout!r} has {len(stages)} stages, and there are {count}: chunks times pp."
        raise PlanError(problem, "Write one | between two stages.")
    spelled = "".join(stages)
    pieces_of_model = f"E{'t' * layers}{'m' * further}L"
    if spelled != pieces_of_model:
        problem = f"the layout {layout!r} spells {_short(spelled)}, and the model is {_short(pieces_of_model)}."
        raise PlanError(problem, "Write E, then a t for each layer, an m for each of mtp_layers, and L.")
    empty = [index for index, stage in enumerate(stages) if not stage]
    if empty:
        raise PlanError(f"stage {empty[0]} of the layout {layout!r} is empty.", "Give each stage a piece of the model.")
    return [stage.count("t") + stage.count("m") for stage in stages]


def _short(pieces: str) -> str:
    """Pieces with repetitions counted, such as ``E t*4 L``."""
    words = []
    for piece, repetitions in re.findall(r"(.)(\1*)", pieces):
        words.append(f"{piece}*{1 + len(repetitions)}" if repetitions else piece)
    return " ".join(words)


def _spelled(layout: str) -> Iterator[str]:
    """Yield the pieces of a layout and the borders between stages, with repetitions spelled out."""
    groups: list[list[str]] = [[]]
    """The pieces of each group that is open, the innermost last; the first is the layout itself."""
    for kind, number in _tokens(layout):
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


def _tokens(layout: str) -> list[tuple[str, str]]:
    """Tokens of a layout: a piece, a border or a bracket, or ``*`` with its number."""
    tokens: list[tuple[str, str]] = []
    position = 0
    while position < len(layout.rstrip()):
        match = _TOKEN.match(layout, position)
        if match is None:
            raise _unread(layout, f"{layout[position:].strip()[0]!r} is none of E t m L | ( ) * and numbers")
        tokens.append((match[1] or "*", match[2] or ""))
        position = match.end()
    return tokens


def _unread(layout: str, why: str) -> PlanError:
    return PlanError(f"the layout {layout!r} cannot be read: {why}.", "Write it like E|(t|)*4,m|L.")


def holders(stages: Sequence[Sequence[Stage]], held_by_stage: Sequence[bool]) -> tuple[int, ...]:
    """Positions on pp that hold a piece of the model, if several do; else none.

    ``stages``: those of each position. ``held_by_stage``: whether each stage holds the piece.
    """
    positions = tuple(rank for rank, own in enumerate(stages) if any(held_by_stage[stage.index] for stage in own))
    return positions if len(positions) > 1 else ()
