"""Reads a YAML spec into plain data and records the place of each key."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from attrs import Factory, frozen
from ruamel.yaml import YAML
from ruamel.yaml.events import (
    AliasEvent,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
    StreamEndEvent,
)

from moefw.compose.spec.unknown import UNKNOWN, UnknownUsedError
from moefw.core.errors import Problem, SpecError

MAX_BYTES = 100_000
MAX_DEPTH = 20
MAX_WHOLE = 2**63 - 1
COMMAND_LINE: Final = "command line"
"""How the place of an override begins."""

KeyPath = tuple[str | int, ...]
Tree = dict[str, object]


@frozen
class Marks:
    """The place of each key: ``{("train", "steps"): "spec.yaml:14:3"}``."""

    name: str
    places: dict[KeyPath, str] = Factory(dict)

    def where(self, path: KeyPath) -> str:
        """``file:line:column a.b[0]`` for ``path``, with the place of its nearest parent if it has none."""
        return f"{self.place(path)} {dotted(path)}".rstrip()

    def place(self, path: KeyPath) -> str:
        """``file:line:column`` of ``path``, or of its nearest parent that has a place."""
        parents = (path[:end] for end in range(len(path), -1, -1))
        return next((self.places[parent] for parent in parents if parent in self.places), self.name)

    def forget(self, path: KeyPath) -> None:
        """Drop the places of ``path`` and of all keys below it."""
        for known in [known for known in self.places if known[: len(path)] == path]:
            del self.places[known]


def dotted(path: KeyPath) -> str:
    """``memory[0].use`` for ``("memory", 0, "use")``. Keys that are not words are quoted."""

    def written(key: str | int) -> str:
        if isinstance(key, int):
            return f"[{key}]"
        return f".{key}" if _WORD.fullmatch(key) else f".{show(key)}"

    return "".join(map(written, path)).removeprefix(".")


def key_path(text: str) -> KeyPath:
    """``("memory", 0, "use")`` for ``memory[0].use`` or ``memory.0.use``."""
    return tuple(int(key) if key.isdecimal() else key for key in re.split(r"[.\[\]]+", text) if key)


def read_spec_file(path: Path, overrides: Sequence[str], problems: list[Problem]) -> tuple[Tree, Marks]:
    """Read ``path`` and apply the overrides (``a.b=c``, with the value read as YAML).

    Raises SpecError if nothing could be read. Other problems are appended to ``problems``.
    """
    name = str(path)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        text = data.decode()
    except UnicodeDecodeError as error:
        raise SpecError(Problem(f"the file is not UTF-8 text: {error.reason}.", "Save it as UTF-8.", name)) from error
    except (OSError, ValueError) as error:
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        raise SpecError(Problem(f"the spec cannot be read: {reason}.", "Check the path.", name)) from error
    if len(data) > MAX_BYTES:
        raise SpecError(Problem(f"the file is larger than {MAX_BYTES:,} bytes.", "A spec is a page.", name))
    marks = Marks(name)
    tree = read_yaml(text, marks, problems)
    for override in overrides:
        try:
            _override(override, tree, marks, problems)
        except SpecError as error:
            problems += error.problems
    return tree, marks


def read_yaml(text: str, marks: Marks, problems: list[Problem]) -> Tree:
    """Return the mapping in ``text`` as plain data, and fill ``marks``. Refused values are ``UNKNOWN``.

    Raises SpecError if the text is not YAML or not a mapping.
    """

    def place(mark: Any) -> str:
        return f"{marks.name}:{mark.line + 1}:{mark.column + 1}" if mark else marks.name

    tree = _Reader(text, marks, problems, place).document(())
    if not isinstance(tree, dict):
        if tree is None:
            content = "nothing"
        elif isinstance(tree, list):
            content = "a list"
        else:
            content = "a single value"
        what = f"a spec is a mapping of sections; this file holds {content}."
        raise SpecError(Problem(what, "Write for example model: {num_experts: 8}.", marks.where(())))
    return tree


class _Reader:
    """Builds plain data from the parser's events: bounded depth; no tags, anchors, aliases or keys other than text."""

    def __init__(self, text: str, marks: Marks, problems: list[Problem], place: Callable[[Any], str]) -> None:
        self.marks = marks
        self.problems = problems
        self.place = place
        self.events = self._parse(text)

    def document(self, path: KeyPath) -> object:
        """Value of the text, which belongs at ``path``."""
        next(self.events)
        if isinstance(next(self.events), StreamEndEvent):
            return None
        event = next(self.events)
        self.marks.places.setdefault(path, self.place(event.start_mark))
        value = self._node(event, path)
        next(self.events)
        extra = next(self.events)
        if not isinstance(extra, StreamEndEvent):
            raise SpecError(self._problem(extra, path, "a second document starts here.", "Keep one."))
        return value

    def _parse(self, text: str) -> Iterator[Any]:
        try:
            yield from YAML(typ="safe", pure=True).parse(text)
        except Exception as error:  # on invalid input, ruamel also raises errors that are not its own
            mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
            what = " ".join((getattr(error, "problem", None) or str(error)).split())
            raise SpecError(Problem(f"this is not YAML: {what}.", "Mend the syntax.", self.place(mark))) from error

    def _until(self, end: type) -> Iterator[Any]:
        while not isinstance(event := next(self.events), end):
            yield event

    def _node(self, event: Any, path: KeyPath) -> object:
        """Return the value of the node that begins with ``event``, and read to its end."""
        if len(path) > MAX_DEPTH:
            what = f"this is nested deeper than {MAX_DEPTH} levels."
            raise SpecError(self._problem(event, path[:1], what, "Flatten it."))
        value: object = UNKNOWN
        if isinstance(event, MappingStartEvent):
            value = self._mapping(path)
        elif isinstance(event, SequenceStartEvent):
            value = self._sequence(path)
        elif isinstance(event, ScalarEvent):
            try:
                value = scalar(event.value, plain=event.implicit[0])
            except ValueError as error:
                self.problems.append(self._problem(event, path, f"{error}.", "Write another value."))
        if isinstance(event, AliasEvent) or event.anchor or event.tag:
            what = "tags, anchors and aliases are not allowed in a spec."
            self.problems.append(self._problem(event, path, what, "Write the value out."))
            return UNKNOWN
        return value

    def _sequence(self, path: KeyPath) -> list[object]:
        items = []
        for index, event in enumerate(self._until(SequenceEndEvent)):
            self.marks.places[*path, index] = self.place(event.start_mark)
            items.append(self._node(event, (*path, index)))
        return items

    def _mapping(self, path: KeyPath) -> Tree:
        tree: Tree = {}
        for event in self._until(MappingEndEvent):
            key = self._node(event, (*path, "?"))
            name = key if isinstance(key, str) else "?"
            self.marks.places.setdefault((*path, name), self.place(event.start_mark))
            value = self._node(next(self.events), (*path, name))
            if isinstance(key, str):
                if key in tree:
                    what = f"{show(key)} stands here twice."
                    self.problems.append(self._problem(event, (*path, key), what, "Keep one."))
                    value = UNKNOWN
                tree[key] = value
            elif key is not UNKNOWN:
                what = f"{show(key)} is not a key; keys are text."
                self.problems.append(self._problem(event, path, what, "Write a word, or put it in quotes."))
        return tree

    def _problem(self, event: Any, path: KeyPath, what: str, fix: str) -> Problem:
        return Problem(what, fix, f"{self.place(event.start_mark)} {dotted(path)}".rstrip())


def _whole(text: str) -> int:
    value = int(text, {"0o": 8, "0x": 16}.get(text[:2], 10)) if len(text) < 30 else MAX_WHOLE + 1
    if not -MAX_WHOLE <= value <= MAX_WHOLE:
        raise ValueError("this number does not fit into 64 bits")
    return value


_WORD = re.compile(r"[\w-]{1,60}")
_CORE_SCHEMA: Final[tuple[tuple[re.Pattern[str], Callable[[str], object]], ...]] = (
    (re.compile(r"|~|null|Null|NULL"), lambda text: None),
    (re.compile(r"true|True|TRUE|false|False|FALSE"), lambda text: text.lower() == "true"),
    (re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+"), _whole),
    (re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"), float),
    (re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"), lambda text: float(text.replace(".", ""))),
)


def scalar(text: str, *, plain: bool = True) -> object:
    """Value of a scalar in the core schema of YAML 1.2 (section 10.3.2). Unless ``plain``, it is text.

    Raises ValueError for a number beyond 64 bits, or text that a file or a spec cannot hold.
    """
    for pattern, read in _CORE_SCHEMA if plain else ():
        if pattern.fullmatch(text):
            return read(text)
    if re.search("[\0\ud800-\udfff]", text):
        raise ValueError("this text holds a character that no file can hold")
    return text


def _override(override: str, tree: Tree, marks: Marks, problems: list[Problem]) -> None:
    """Apply ``a.b[0].c=d`` to ``tree``, and create missing sections. Raises SpecError if the path does not exist."""
    name, equals, text = override.partition("=")
    place = f"{COMMAND_LINE}, {show(override, limit=200)}"
    *parents, last = re.sub(r"\[([0-9]+)\]", r".\1", name).split(".")
    if not equals or not all((*parents, last)):
        raise SpecError(Problem("an override is written key.path=value.", "For example train.steps=20.", place))
    holder: Any = tree
    path: KeyPath = ()
    for key in parents:
        path = (*path, _step(holder, key, path, place))
        if isinstance(holder, dict) and holder.get(key) is None:
            holder[key] = {}
            marks.places[path] = place
        holder = holder[path[-1]]
        if holder is UNKNOWN:
            return
    path = (*path, _step(holder, last, path, place))
    marks.forget(path)
    marks.places[path] = place
    holder[path[-1]] = UNKNOWN
    holder[path[-1]] = _Reader(text, marks, problems, lambda mark: place).document(path)


def _step(holder: object, key: str, path: KeyPath, place: str) -> str | int:
    """``key`` as a key of a section (itself) or of a list (an index). Raises SpecError."""
    if isinstance(holder, dict):
        return key
    if not isinstance(holder, list):
        what = f"{dotted(path)} is neither a section nor a list, so it has no {show(key)}."
        raise SpecError(Problem(what, "Override it as a whole.", f"{place} {dotted(path)}"))
    if key not in map(str, range(len(holder))):
        what = f"{dotted(path)} has {len(holder)} items and none at {show(key)}; they count from 0."
        raise SpecError(Problem(what, "Override the list as a whole.", f"{place} {dotted(path)}"))
    return int(key)


def counted(number: int, noun: str) -> str:
    """``1 rank`` or ``2 ranks``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def show(value: object, *, limit: int = 60) -> str:
    """Value as errors print it: in YAML notation, cut to ``limit`` characters."""
    try:
        text = repr(value)
    except (Exception, UnknownUsedError):  # repr raises for some objects of plugins, and what holds UNKNOWN
        text = f"a {type(value).__name__}"
    text = {"None": "null", "True": "true", "False": "false"}.get(text, text)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
