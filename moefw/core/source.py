"""Reads a YAML spec into plain data and remembers where each key stood."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from attrs import Factory, frozen
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.tokens import AliasToken, AnchorToken, TagToken

from moefw.core.errors import Problem

MAX_BYTES = 1_000_000
MAX_DEPTH = 20

KeyPath = tuple[str | int, ...]
Tree = dict[str, object]


@frozen
class Marks:
    """The place of each key: ``{("train", "steps"): "spec.yaml:14:3"}``."""

    name: str
    places: dict[KeyPath, str] = Factory(dict)

    def where(self, path: KeyPath) -> str:
        """Return ``file:line:column a.b[0]`` for ``path``, or for its nearest parent that has a place."""
        for end in range(len(path), -1, -1):
            place = self.places.get(path[:end])
            if place is not None:
                return f"{place} {dotted(path)}".rstrip()
        return f"{self.name} {dotted(path)}".rstrip()


def dotted(path: KeyPath) -> str:
    """Return ``memory[0].use`` for ``("memory", 0, "use")``."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).lstrip(".")


def read_spec_file(path: Path, overrides: Sequence[str], problems: list[Problem]) -> tuple[Tree, Marks]:
    """Read ``path`` and lay the overrides (``a.b=c``, the value read as YAML) over it.

    What is wrong goes to ``problems``; what could be read is returned all the same.
    """
    marks = Marks(str(path))
    tree: Tree = {}
    try:
        if path.stat().st_size > MAX_BYTES:
            problems.append(Problem(f"the file is larger than {MAX_BYTES:,} bytes", "A spec is a page.", str(path)))
        else:
            tree = read_yaml(path.read_text(encoding="utf-8"), marks, problems)
    except UnicodeDecodeError as error:
        problems.append(Problem(f"the file is not UTF-8 text ({error.reason})", "Save it as UTF-8.", str(path)))
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        problems.append(Problem(f"the spec cannot be read: {reason}", "Check the path.", str(path)))
    for override in overrides:
        _apply_override(override, tree, marks, problems)
    return tree, marks


def read_yaml(text: str, marks: Marks, problems: list[Problem]) -> Tree:
    """Return the mapping in ``text`` as plain data; fill ``marks``; report what YAML 1.2 or we refuse."""
    try:
        for token in YAML().scan(text):
            if isinstance(token, AliasToken | AnchorToken | TagToken):
                place = f"{marks.name}:{token.start_mark.line + 1}:{token.start_mark.column + 1}"
                what = "tags, anchors and aliases are not allowed in a spec"
                problems.append(Problem(what, "Write the value out.", place))
                return {}
        node = YAML(typ="rt").load(text)
        tree = _plain(node, (), marks, 0)
    except RecursionError:
        problems.append(Problem(f"the spec is nested deeper than {MAX_DEPTH} levels", where=marks.name))
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{marks.name}:{mark.line + 1}:{mark.column + 1}" if mark else marks.name
        what = " ".join((error.problem or str(error)).split())
        problems.append(Problem(f"this is not YAML: {what}", "Mend the syntax here.", place))
    except (YAMLError, ValueError, NotImplementedError) as error:
        what = " ".join(str(error).split())
        problems.append(Problem(f"this is not YAML: {what}", "Mend the syntax.", marks.name))
    else:
        if isinstance(tree, dict):
            return tree
        found = "nothing" if tree is None else f"a {type(tree).__name__}"
        problems.append(Problem(f"a spec is a mapping of sections; this file holds {found}", where=marks.name))
    return {}


def _plain(node: object, path: KeyPath, marks: Marks, depth: int) -> object:
    """Turn ruamel's nodes into dicts, lists and scalars, noting the place of every key and item."""
    if depth > MAX_DEPTH:
        raise RecursionError
    if isinstance(node, CommentedMap):
        plain: Tree = {}
        for key, value in node.items():
            place = node.lc.key(key)
            name = str(key)
            marks.places[(*path, name)] = f"{marks.name}:{place[0] + 1}:{place[1] + 1}"
            plain[name] = _plain(value, (*path, name), marks, depth + 1)
        return plain
    if isinstance(node, CommentedSeq):
        items = []
        for index, value in enumerate(node):
            place = node.lc.item(index)
            marks.places[(*path, index)] = f"{marks.name}:{place[0] + 1}:{place[1] + 1}"
            items.append(_plain(value, (*path, index), marks, depth + 1))
        return items
    return _scalar(node)


def _scalar(node: object) -> object:
    for kind in (bool, int, float, str):
        if isinstance(node, kind):
            return kind(node)
    return node


def _apply_override(override: str, tree: Tree, marks: Marks, problems: list[Problem]) -> None:
    key, equals, text = override.partition("=")
    place = f"command line, {override!r}"
    if not equals or not all(key.split(".")):
        problems.append(Problem("an override is written key.path=value", "For example train.steps=20.", place))
        return
    value_marks = Marks(place)
    value = read_yaml(f"value: {text}", value_marks, problems).get("value")
    parent: object = tree
    *parents, last = _override_path(key)
    for name in parents:
        parent = _child(parent, name)
    if isinstance(parent, dict) and isinstance(last, str):
        parent[last] = value
    elif isinstance(parent, list) and isinstance(last, int) and last < len(parent):
        parent[last] = value
    else:
        problems.append(Problem(f"{key} does not lead into a section of the spec", where=place))
        return
    marks.places[(*parents, last)] = place


def _child(parent: object, name: str | int) -> object:
    if isinstance(parent, dict) and isinstance(name, str):
        return parent.setdefault(name, {})
    if isinstance(parent, list) and isinstance(name, int) and name < len(parent):
        return parent[name]
    return None


def _override_path(key: str) -> Iterator[str | int]:
    for name in key.split("."):
        yield int(name) if name.isdigit() else name
