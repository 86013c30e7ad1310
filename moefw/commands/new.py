"""``moefw new``: a third-party package that passes its suite as generated."""

from __future__ import annotations

import importlib.util
import keyword
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click
from attrs import frozen

import moefw
from moefw.compose.registry import Registry
from moefw.core.errors import Problem, SpecError
from moefw.core.kinds import KINDS
from moefw.system.folders import scratch_folder

TEMPLATES: Final = Path(__file__).parent.parent / "templates"
"""``package`` holds the files of all kinds; a kind's own files replace them. Everything is called ``sample`` there.

A kind's ``spec.yaml`` and ``changes.md`` are pieces of its ``README.md``: how a spec chooses it, and what to change.
"""
PIECES: Final = {"{spec}": "spec.yaml", "{changes}": "changes.md"}
LONGEST_NAME: Final = 32


@click.command()
@click.argument("kind", type=click.Choice(list(KINDS)))
@click.argument("name")
@click.option("--into", default=".", type=click.Path(path_type=Path), help="The folder that gets the package's folder.")
def new(kind: str, name: str, into: Path) -> int:
    """Write a package moefw-NAME with a KIND called NAME: complete, and certified by the suite that we ship.

    Nothing is written where NAME or the folder is taken.
    """
    if KINDS[kind].why_not:
        raise SpecError(f"there is no template of {KINDS[kind].one}.", KINDS[kind].why_not)
    named = Names.of(name, kind)
    problems = [*_name_problems(named, kind), *_place_problems(named, into)]
    if problems:
        raise SpecError(problems)
    try:
        target = _write(kind, named, into)
    except OSError as error:
        raise SpecError(f"{into}: {named.distribution} cannot be written: {error.strerror}.") from error
    click.echo(f"{click.format_filename(target)} holds {KINDS[kind].one} called {named.part}. Next:")
    click.echo(f"  cd {click.format_filename(target)}")
    click.echo("  pip install --editable '.[test]'")
    click.echo("  pytest                 # certifies it")
    return 0


@frozen
class Names:
    """The names in a package."""

    part: str
    module: str
    distribution: str
    declaration: str

    @classmethod
    def of(cls, name: str, kind: str) -> Names:
        """Names of a part, normalised as package indexes do. Raises SpecError.

        The class of ``hash-router`` is ``Hash``, which builds a ``HashRouter``.
        """
        part = re.sub(r"[-_.]+", "-", name).lower().removeprefix("moefw-")
        if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", part) or len(part) > LONGEST_NAME:
            what = f"{name!r} cannot be the name of a package, of a module and of a class."
            fix = f"Use a letter, then letters, digits and single hyphens, {LONGEST_NAME} characters at most."
            raise SpecError(what, fix)
        words = part.split("-")
        of_kind = kind.split("_")
        says_kind = len(words) > len(of_kind) and words[-len(of_kind) :] == of_kind
        return cls(
            part=part,
            module="_".join(["moefw", *words]),
            distribution=f"moefw-{part}",
            declaration="".join(map(str.capitalize, words[: -len(of_kind)] if says_kind else words)),
        )


def _name_problems(names: Names, kind: str) -> Iterator[Problem]:
    installed = Registry().names
    if names.part in installed:
        yield Problem(
            f"an installed plugin is called {names.part!r} already.", "See moefw plugins, and use another name."
        )
    elif importlib.util.find_spec(names.module) is not None:
        yield Problem(f"a package {names.module} is installed already.", "Use another name.")
    code = " ".join(path.read_text(encoding="utf-8") for path in _sources(kind).values() if path.suffix == ".py")
    words = set(re.findall(r"\w+", code))
    if names.part in ("true", "false", "null", "none") or keyword.iskeyword(names.declaration):
        yield Problem(f"{names.part!r} is a word of YAML or Python.", "Use another name.")
    elif names.declaration in words:
        yield Problem(
            f"the {KINDS[kind].noun} needs the name {names.declaration} for something else.", "Use another name."
        )


def _place_problems(names: Names, into: Path) -> Iterator[Problem]:
    target = into / names.distribution
    if not into.is_dir():
        yield Problem(f"--into {into} is not a folder.", "Make it first.")
    elif os.path.lexists(target):
        yield Problem(f"{target} exists already.", "Use another name, or another folder: --into DIR.")


def _sources(kind: str) -> dict[Path, Path]:
    """Templates of a kind by their place in the package."""
    folders = (TEMPLATES / "package", TEMPLATES / kind)
    return {
        path.relative_to(folder): path
        for folder in folders
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts and path.name not in PIECES.values()
    }


def _write(kind: str, names: Names, into: Path) -> Path:
    """Write the package to a temporary folder and rename that, so that it appears whole or not at all."""
    with_article = KINDS[kind].one
    pieces = {word: (TEMPLATES / kind / file).read_text(encoding="utf-8").rstrip() for word, file in PIECES.items()}
    words = {
        **pieces,
        "{one}": with_article[0].upper() + with_article[1:],
        "{kind}": KINDS[kind].noun,
        "moefw>=0.0": "moefw>=" + ".".join(moefw.__version__.split(".")[:2]),
        "KindSuite": str(KINDS[kind].suite),
        "moefw_sample": names.module,
        "moefw-sample": names.distribution,
        "Sample": names.declaration,
        "test_sample": f"test_{names.part.replace('-', '_')}",
        "sample": names.part,
    }

    def renamed(text: str) -> str:
        pattern = "|".join(map(re.escape, words))

        def replacement(match: re.Match[str]) -> str:
            word = words[match[0]]
            return renamed(word) if match[0].startswith("{") else word  # a text in braces may hold other words

        return re.sub(pattern, replacement, text)

    target = into / names.distribution
    with scratch_folder(into) as made:
        for place, source in _sources(kind).items():
            path = made / renamed(str(place))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(renamed(source.read_text(encoding="utf-8")), encoding="utf-8")
        made.rename(target)
    return target
