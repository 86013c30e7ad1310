"""What a page is made of: sections of words, pictures and tables, as data. ``page`` makes HTML of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from attrs import field, frozen


@frozen
class Words:
    """Sentences, a paragraph each. ``quiet``: of what is missing, or how to read a picture."""

    sentences: Sequence[str]
    quiet: bool = False
    kind: str = field(default="words", init=False)


@frozen(kw_only=True)
class Table:
    """Rows under a head. Columns in ``texts`` hold text, the others numbers; ``title`` may be empty.

    Of more than ``visible`` rows a reader sees the others on demand.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    texts: Sequence[int] = (0,)
    visible: int = 24
    kind: str = field(default="table", init=False)


@frozen
class Facts:
    """Terms, each with what is said of it."""

    rows: Sequence[tuple[str, str]]
    kind: str = field(default="facts", init=False)


@frozen(kw_only=True)
class Bars:
    """Bars of parts, which need no script: rows of (label, value in words, share of the longest bar, 0 to 1)."""

    title: str
    rows: Sequence[tuple[str, str, float]]
    kind: str = field(default="bars", init=False)


def bars(title: str, values: Mapping[str, float], words: Callable[[float], str]) -> Bars:
    """Bars of values by their labels, in this order. ``words``: says a value."""
    longest = max(values.values(), default=0) or 1
    return Bars(title=title, rows=[(label, words(value), value / longest) for label, value in values.items()])


@frozen
class Preformatted:
    """Text of a run as it is."""

    text: str
    kind: str = field(default="preformatted", init=False)


@frozen(kw_only=True)
class Picture:
    """A figure of ``Charts``: its number, height in pixels, title and unit.

    ``legend``: label, role and shape (``line`` or ``dot``) of what is drawn.
    """

    number: int
    height: int
    title: str
    unit: str
    legend: Sequence[tuple[str, str, str]] = ()
    heat: int | None = None
    """The number of the heat map, if it is one."""
    windows: int = 0
    """Number of its windows."""
    kind: str = field(default="picture", init=False)


Block = Words | Table | Facts | Bars | Preformatted | Picture


@frozen
class Section:
    """A part of the page under a title. ``name`` is its anchor."""

    name: str
    title: str
    blocks: Sequence[Block]


def missing(what: str, how: str) -> Words:
    """Line about what was not recorded, and what would record it."""
    return Words([f"{what} {how}"], quiet=True)
