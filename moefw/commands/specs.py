"""Reads a spec file into an assembly, for all commands."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from moefw.compose.assembly import Assembly
from moefw.compose.defaults import defaults
from moefw.compose.registry import Registry
from moefw.compose.resolve import assemble
from moefw.core.data import TOKENIZER
from moefw.core.errors import SpecError
from moefw.core.site import Machine
from moefw.training.folder import check_seal


def read(
    spec: str,
    overrides: Sequence[str],
    world: int | None = None,
    *,
    registry: Registry | None = None,
    machine: Callable[[str], Machine] | None = None,
    trains: bool = True,
    files_here: bool = False,
) -> Assembly:
    """Resolve a spec file, by default to train. Raises all its problems at once.

    A run's own spec must be as the run wrote it. ``registry``: one for several specs; None: a new one. ``machine``:
    function that returns what the spec runs on, for the device that it asks for; None: this machine. ``trains``:
    problems are also those of what training alone needs, as far as they are known before data are opened.
    ``files_here``: also those of files that this machine lacks, and of a folder that cannot hold the run.
    """
    path = Path(spec)
    if path.name == "spec.yaml" and path.is_file():
        check_seal(path)
    return assemble(
        path,
        overrides,
        defaults=defaults(),
        registry=registry,
        world=world,
        machine=machine,
        trains=trains,
        for_run=trains,
        files_here=files_here,
    )


def read_run(run: str, overrides: Sequence[str]) -> Assembly:
    """Resolve the spec of a run's folder for one rank, which then holds all experts, and does not train.

    If the run was moved and its ``tokenizer.json`` is no longer found, the copy in the folder is used.
    """
    spec = Path(run) / "spec.yaml"
    if not spec.is_file():
        raise SpecError(f"{run} is not the folder of a run: it holds no spec.yaml.", "Give the run.dir of a training.")
    alone = ["parallel={}", f"run.dir={json.dumps(run, ensure_ascii=False)}"]
    assembly = read(str(spec), [*alone, *overrides], 1, trains=False)
    kept = spec.with_name(TOKENIZER)
    options = words(assembly.spec.data.options)
    named = [(option, Path(value)) for option, value in options if option.rpartition(".")[2] == "tokenizer"]
    moved = [option for option, path in named if path.name == TOKENIZER and not path.exists()]
    if not moved or not kept.exists():
        return assembly
    alone += [f"data.{option}={json.dumps(str(kept), ensure_ascii=False)}" for option in moved]
    return read(str(spec), [*alone, *overrides], 1, trains=False)


def words(options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the options that are text, by key path, also those of plugins that the options name."""
    for key, value in options.items():
        if isinstance(value, str):
            yield key, value
        elif isinstance(value, list | tuple):
            for index, item in enumerate(value):
                if isinstance(item, Mapping):
                    yield from ((f"{key}.{index}.{inner}", word) for inner, word in words(item))
