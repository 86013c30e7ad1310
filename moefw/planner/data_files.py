"""Reading of the planner's data: files of a folder by name, or a user's own by path. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, TypeVar

from attrs import Attribute, field, frozen
from attrs.validators import gt

from moefw.compose.spec.source import Marks, read_yaml
from moefw.compose.spec.structure import structure
from moefw.core.errors import Problem, SpecError, nearest, os_reason

T = TypeVar("T")
SUFFIX: Final = ".yaml"


def _one_of_both(figure: Figure, _: Attribute[str], value: str) -> None:
    if bool(value) is bool(figure.source):
        raise ValueError("a figure has either a source, or estimated: how it was estimated.")


@frozen(kw_only=True)
class Figure:
    """A number, and where it was published, or how it was estimated where nobody publishes it."""

    value: float = field(validator=gt(0.0))
    source: str = ""
    estimated: str = field(default="", validator=_one_of_both)


def names(folder: Path) -> list[str]:
    """Names of the files of a folder, without their suffix."""
    return sorted(path.stem for path in folder.glob(f"*{SUFFIX}"))


def read(kind: type[T], folder: Path, name: str, *, option: str, called: str, others: Sequence[str] = ()) -> T:
    """Object of ``kind`` in a file of ``folder``, or in the file whose path ``name`` is.

    ``option`` and ``called``: the option that ``name`` is of, and what is called so, for errors. ``others``: names that
    are elsewhere, for suggestions. Raises SpecError with every problem of the file.
    """
    path = folder / f"{name}{SUFFIX}"
    if name not in names(folder):
        path = Path(name)
        if path.suffix != SUFFIX:
            fix = f"{nearest(name, [*names(folder), *others])} Or name a {SUFFIX} file."
            raise SpecError(f"{option} {name}: no {called} is called so.", fix)
    return read_file(kind, path, option=option)


def read_file(kind: type[T], path: Path, *, option: str) -> T:
    """Object of ``kind`` in a file. Raises SpecError with every problem of the file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = os_reason(error) if isinstance(error, OSError) else "it is no text"
        raise SpecError(f"{option} {path}: {reason}.", "Name a file that can be read.") from error
    marks = Marks(path.name)
    problems: list[Problem] = []
    tree = read_yaml(text, marks, problems)
    found = structure(kind, tree, (), marks, problems)
    if problems or found is None:
        raise SpecError(problems)
    return found
