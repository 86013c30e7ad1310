"""Reads a spec file into an assembly, for all commands."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from moefw.compose.assembly import Assembly
from moefw.compose.defaults import defaults
from moefw.compose.resolve import assemble
from moefw.core.errors import SpecError
from moefw.training.folder import TOKENIZER, check_seal


def read(spec: str, overrides: Sequence[str], world: int | None = None) -> Assembly:
    """Resolve a spec file. Raises all its problems at once. A run's own spec must be as the run wrote it."""
    path = Path(spec)
    if path.name == "spec.yaml" and path.is_file():
        check_seal(path)
    return assemble(path, overrides, defaults=defaults(), world=world)


def read_run(run: str, overrides: Sequence[str]) -> Assembly:
    """Resolve the spec of a run's folder for one rank, which then holds all experts.

    If the run was moved and its ``tokenizer.json`` is no longer found, the copy in the folder is used.
    """
    spec = Path(run) / "spec.yaml"
    if not spec.is_file():
        raise SpecError(f"{run} is not the folder of a run: it holds no spec.yaml.", "Give the run.dir of a training.")
    alone = ["parallel={}", f"run.dir={json.dumps(run, ensure_ascii=False)}"]
    assembly = read(str(spec), [*alone, *overrides], 1)
    named, kept = assembly.spec.data.options.get("tokenizer"), spec.with_name(TOKENIZER)
    if not isinstance(named, str) or Path(named).name != TOKENIZER or Path(named).exists() or not kept.exists():
        return assembly
    alone.append(f"data.tokenizer={json.dumps(str(kept), ensure_ascii=False)}")
    return read(str(spec), [*alone, *overrides], 1)
