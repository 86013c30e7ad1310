"""An error names a fix, and the fix is accepted by the next check."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moefw.compose.advice import MOST_PLACES, OTHER_NAMES
from moefw.compose.registry import Registry
from moefw.compose.resolve import assemble
from moefw.compose.spec.hints import flow
from moefw.core.errors import MoefwError, Problem
from moefw.core.kinds import KINDS
from moefw.core.site import Machine
from pairwise import deep
from spec_cases import DEFAULTS, GOOD, REGISTRY, assembled, complaint

pytestmark = pytest.mark.usefixtures("empty_folder")

REFUSED = re.compile(
    r"is not (an option|a |an |plain|one of|true)|is missing|no plugin is called|has no preset|must be"
)
"""What says that a key, or a value by itself, is refused. A value may still not fit the other values."""


def problems(*overrides: str, files_here: bool = False) -> list[Problem]:
    Path("spec.yaml").write_text(GOOD)
    try:
        assemble(
            Path("spec.yaml"),
            overrides,
            defaults=DEFAULTS,
            registry=REGISTRY,
            machine=Machine(),
            for_run=True,
            files_here=files_here,
        )
    except MoefwError as error:
        return list(error.problems)
    return []


def obeyed(override: str, problem: Problem) -> list[str]:
    """Overrides that a fix names, in place of one that was refused."""
    path, _, value = override.partition("=")
    keys = re.findall(r"'([^']+)'", problem.fix) if problem.fix.startswith("Did you mean") else []
    if "is not an option" in problem.what:
        section = path.rpartition(".")[0]
        near = [key for key in keys if "." not in key and f"section '{key}'" not in problem.fix]
        return [f"{f'{section}.{key}'.strip('.') if key in near else key}={value}" for key in keys]
    written = re.fullmatch(r"Write (?:for example )?(.*)\.", problem.fix)
    known = re.fullmatch(r"Known: (.*)\.", problem.fix)
    values = keys or (known[1].split(", ") if known else [written[1]] if written else [])
    return [f"{path}={new}" for new in values if not new.startswith("a ")]


def leaves(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, (*path, key))
        elif key != "use":
            yield (*path, key), value


def refused(override: str) -> list[str]:
    return [str(problem) for problem in problems(override) if REFUSED.search(problem.what)]


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        ("parallel.ep=2", "Did you mean 'parallel.experts.ep'?"),
        ("routing.top_k=2", "Did you mean 'model.top_k'?"),
        ("learning_rate=1e-3", "Did you mean 'train.lr'?"),
        ("train.learning-rate=1e-3", "Did you mean 'train.lr'?"),
        ("model.num_head=2", "Did you mean 'attention.num_heads'?"),
        ("memory[0].region=[layer]", "Did you mean 'regions'?"),
        ("run.memory=[]", "Did you mean the section 'memory'?"),
        ("optimizer={use: adamw}", "Did you mean 'train.optimizer'?"),
        ("model.order=[dp]", "Did you mean 'parallel.dense.order' or 'parallel.experts.order'?"),
        ("model=qwen3-moe-tiny", "Write {preset: qwen3-moe-tiny}."),
        ("model=qwen3-moe-tny", "Write for example {preset: qwen3-moe-tiny}."),
        ("routing=topk", "Write {use: topk}."),
        ("routing=alltoall", "Write for example {use: topk}."),
        ("dispatch=3", "Write for example {use: alltoall}."),
        ("memory=[keep]", "Write {use: keep}."),
        ("memory={use: keep, regions: [layer]}", "Write [{use: keep, regions: [layer]}]."),
        ("data={use: blend, parts: [text]}", "Write {use: text}."),
        ("train=fast", "Write for example {steps: 300}."),
        ("parallel.experts=4", "Write for example {ep: 1}."),
        ("run.observers=wandb", "Write [wandb]."),
        ("train.lr=small", "Write for example 0.003."),
        ("train.steps=1e3", "Write 1000."),
        ("train.steps=0.0", "Write for example 300."),
        ("run.dir={a: 1}", "Write for example runs/default."),
        ("data={use: jsonl}", "File or folder; of a folder, the files with the ending of the source are read."),
    ],
)
def test_an_error_answers(override: str, fix: str) -> None:
    assert complaint(GOOD, override).endswith(f" {fix}")


def test_an_option_in_another_section_is_answered_with_its_place() -> None:
    answered = 0
    for path, value in leaves(assembled(GOOD).resolved()):
        override = f"run.{path[-1]}={flow(value)}"
        for problem in problems(override):
            fixes = obeyed(override, problem)
            assert f"{'.'.join(path)}={flow(value)}" in fixes or len(fixes) == MOST_PLACES, (override, problem)
            assert [again for fix in fixes for again in refused(fix) if "is not an option" in again] == []
            answered += 1
    assert answered > 50


@pytest.mark.parametrize("wrong", [*deep("{a: {b: 1}}"), "neither nor"])
def test_an_example_of_a_value_is_accepted(wrong: str) -> None:
    answered = 0
    for path, _ in leaves(assembled(GOOD).resolved()):
        override = f"{'.'.join(path)}={wrong}"
        for problem in problems(override):
            if problem.where.endswith(f" {'.'.join(path)}") and "preset" not in path:
                for fix in obeyed(override, problem):
                    as_written = fix == f"{'.'.join(path)}={flow([wrong])}"
                    again = [told for told in refused(fix) if not (as_written and "no plugin is called" in told)]
                    assert again == [], (override, str(problem))
                    answered += 1
    assert answered > 5


def test_a_section_that_is_a_name_is_answered_with_the_choice_of_that_name() -> None:
    registry = Registry()
    registry.load_all()
    for part in registry.parts():
        section = KINDS[part.kind].section
        override = f"{section}=[{part.name}]" if KINDS[part.kind].many else f"{section}={part.name}"
        (problem,) = problems(override)
        assert problem.fix == f"Write {{use: {flow(part.name)}}}."
        for preset in part.declaration.presets():
            (problem,) = problems(f"{section}={preset}")
            assert problem.fix == f"Write {{preset: {preset}}}."
            assert refused(f"{section}={{preset: {preset}}}") == []


def test_names_of_other_frameworks_stand_for_options_that_exist() -> None:
    options = {".".join(path) for path, _ in leaves(assembled(GOOD).resolved())}
    names = [name for written in OTHER_NAMES.values() for name in written.split()]
    assert OTHER_NAMES.keys() <= options
    assert len(names) == len(set(names))
    assert not {path.rpartition(".")[2] for path in options} & set(names)
    for option, written in OTHER_NAMES.items():
        for name in written.split():
            assert complaint(GOOD, f"{name}=1").endswith(f"Did you mean {option!r}?")


class TestFilesOfData:
    def test_that_are_not_there_are_told_beside_other_problems(self) -> None:
        Path("corpus").mkdir()
        first, second = problems("data.path=corpsu", "train.lr=-1", files_here=True)
        assert "'lr' must be > 0.0" in str(first)
        assert str(second).endswith(f"data.path: {Path('corpsu').absolute()} does not exist. Did you mean 'corpus'?")
        assert problems("data.path=corpus", files_here=True) == []

    @pytest.mark.parametrize(
        ("data", "options"),
        [
            ("{use: jsonl, path: none, tokenizer: none.json}", ["data.path", "data.tokenizer"]),
            ("{use: megatron, path: none.bin, tokenizer: none.json}", ["data.path", "data.path", "data.tokenizer"]),
            ("{use: blend, parts: [{use: text, path: none}]}", ["data.parts[0].path"]),
            ("{use: text, tokenizer: bytes}", []),
        ],
    )
    def test_are_looked_for_by_every_source(self, data: str, options: list[str]) -> None:
        told = problems(f"data={data}", files_here=True)
        assert [problem.where.rpartition(" ")[2] for problem in told] == options
        assert problems(f"data={data}") == []
