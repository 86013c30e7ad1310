"""``moefw new``: a third-party package that passes its suite as generated."""

from __future__ import annotations

import importlib.util
import keyword
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import click
from attrs import frozen

import moefw
from moefw.compose.registry import Registry
from moefw.core.errors import Problem, SpecError
from moefw.system.folders import scratch_folder

TEMPLATES: Final = Path(__file__).parent.parent / "templates"
"""``package`` holds the files of all kinds; a kind's own files replace them. Everything is called ``sample`` there."""
LONGEST_NAME: Final = 32


@frozen
class Kind:
    """A kind of plugin that ``moefw new`` writes, called ``noun`` in a sentence.

    ``spec`` chooses it in a spec. ``runtime`` says what to change in its file, or at ``where`` if it has none.
    """

    noun: str
    suite: str
    spec: str
    runtime: str
    where: str = ""

    @property
    def one(self) -> str:
        """The noun with its article."""
        return f"{'an' if self.noun[0] in 'aeiou' else 'a'} {self.noun}"


KINDS: Final[Mapping[str, Kind]] = {
    "dispatcher": Kind(
        "dispatcher",
        "DispatcherSuite",
        "dispatch: {use: sample}",
        "how rows travel: `plan` exchanges metadata, each movement is a start and a finish.",
    ),
    "attention": Kind(
        "attention",
        "AttentionSuite",
        "attention: {use: sample}",
        "how a token reads the earlier tokens of its document: projections around\n"
        "  `attend`, heads split over the ranks of tp. `tests` has its formula.",
    ),
    "context": Kind(
        "context parallelism",
        "ContextParallelSuite",
        "context_parallel: {use: sample}",
        "what the ranks of cp exchange around the core of attention, in forward and backward.",
    ),
    "router": Kind(
        "router",
        "RouterSuite",
        "routing: {use: sample}",
        "how tokens choose. What is to be known after a step goes into `stats`; state is declared in\n"
        "  `state_spec` and moves in `update`. If tokens look at each other, `offers` must say so: `partition`.",
    ),
    "gemm": Kind(
        "GEMM",
        "GemmSuite",
        "gemm: {use: sample}",
        "the experts. It owns their parameters and names them in `canonical`, so that\n"
        "  checkpoints and layouts find them.",
    ),
    "precision": Kind(
        "precision recipe",
        "PrecisionSuite",
        "precision: {use: sample}",
        "how operands are rounded, and in which dtype activations flow.",
    ),
    "memory": Kind(
        "memory policy",
        "MemorySuite",
        "memory:\n  - {use: sample, regions: [experts]}",
        "what happens to what a region saves between forward and backward.",
    ),
    "layout": Kind(
        "layout",
        "LayoutSuite",
        "parallel: {use: sample, ep: 2}",
        "how ranks are arranged into two meshes; the core opens the groups.",
        where="`Sample.plan` in `moefw_sample/__init__.py`",
    ),
    "pipeline": Kind(
        "pipeline schedule",
        "PipelineSuite",
        "pipeline: {use: sample}",
        "what each rank runs, in order; `rank_of` and `chunks`\n"
        "  say which stages it has, `check_batches` how many micro-batches it can run.",
        where="`Sample.order` in `moefw_sample/__init__.py`",
    ),
}


@click.command()
@click.argument("kind", type=click.Choice(list(KINDS)))
@click.argument("name")
@click.option("--into", default=".", type=click.Path(path_type=Path), help="The folder that gets the package's folder.")
def new(kind: str, name: str, into: Path) -> int:
    """Write a package moefw-NAME with a KIND called NAME: complete, and certified by the suite that we ship.

    Nothing is written where NAME or the folder is taken.
    """
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
        return cls(
            part=part,
            module="_".join(["moefw", *words]),
            distribution=f"moefw-{part}",
            declaration="".join(map(str.capitalize, words[:-1] if words[1:] and words[-1] == kind else words)),
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
        yield Problem(f"the {kind} needs the name {names.declaration} for something else.", "Use another name.")


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
        if path.is_file() and "__pycache__" not in path.parts
    }


def _write(kind: str, names: Names, into: Path) -> Path:
    """Write the package to a temporary folder and rename that, so that it appears whole or not at all."""
    where = KINDS[kind].where or f"`moefw_sample/{kind}.py`"
    words = {
        "{one}": KINDS[kind].one[0].upper() + KINDS[kind].one[1:],
        "{kind}": KINDS[kind].noun,
        "{spec}": KINDS[kind].spec,
        "{changes}": f"- {where}: {KINDS[kind].runtime}",
        "moefw>=0.0": "moefw>=" + ".".join(moefw.__version__.split(".")[:2]),
        "KindSuite": KINDS[kind].suite,
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
