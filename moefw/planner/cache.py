"""Files of plain data in the cache, under digests of all that they depend on. Imports no torch."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from attrs import fields

from moefw.compose.assembly import Assembly, ChosenPlugins
from moefw.core.errors import PlanError


def stored(path: Path) -> Any | None:
    """Data in a file of the cache; None if it is missing, or not as :func:`store` wrote it."""
    try:
        entry = json.loads(path.read_bytes())
        return entry["data"] if entry["sha256"] == digest(entry["data"]) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def store(path: Path, data: Any) -> None:
    """Write data and a hash of it, whole or not at all. Does nothing if the folder cannot be written."""
    entry = json.dumps({"data": data, "sha256": digest(data)}).encode()
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with scratch.open("xb") as file:
            file.write(entry)
            file.flush()
            os.fsync(file.fileno())  # otherwise a crash of the machine could leave the name without the content
        scratch.replace(path)
    except OSError:
        with suppress(OSError):
            scratch.unlink()


def digest(data: Any) -> str:
    """Hash of plain data."""
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()


def identity(assembly: Assembly) -> list[Any]:
    """What a measurement of an assembly depends on beside code: spec, world, facts, versions, frozen weights."""
    facts = [[number, sorted(layer.facts.items())] for number, layer in assembly.layers.items()]
    versions = [importlib.metadata.version("torch"), sys.version]
    return [assembly.digest(), assembly.site.ranks_per_node, repr(facts), versions, [*_weights(assembly)]]


def _weights(assembly: Assembly) -> Iterator[Any]:
    """Yield path, size and time of every file that says as what frozen weights are held."""
    if assembly.frozen:
        for path in sorted(Path(assembly.spec.train.weights or "").glob("*.safetensors")):
            state = path.stat()
            yield str(path.absolute()), state.st_size, state.st_mtime_ns


def packages(assembly: Assembly) -> frozenset[str]:
    """Top-level modules of the code of an assembly's parts, and of moefw."""
    parts = [getattr(assembly.parts, field.name) for field in fields(ChosenPlugins) if field.name != "memory"]
    names = {type(part).__module__.partition(".")[0] for part in (*parts, *assembly.parts.memory)}
    return frozenset(names | {"moefw", "moefw_kernels"})


def sources(names: frozenset[str]) -> Iterator[Any]:
    """Yield path, size and time of every source file of top-level modules."""
    for name in sorted(names):
        for path in _files(name):
            state = path.stat()
            yield str(path), state.st_size, state.st_mtime_ns


def _files(name: str) -> list[Path]:
    """Source files of a top-level module. Raises PlanError for code without a file, as in a notebook."""
    module = sys.modules.get(name) or importlib.util.find_spec(name)
    folders = getattr(module, "__path__", None) or getattr(module, "submodule_search_locations", None)
    if folders:
        return [path for folder in folders for path in sorted(Path(folder).rglob("*.py"))]
    file = getattr(module, "__file__", None)
    if file is None:
        raise PlanError(
            f"the code of {name} is in no file, so a cached plan cannot be told from an old one.", "Give no cache."
        )
    return [Path(file)]
