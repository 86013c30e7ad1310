"""The ledger of a spec: from the cache, or measured and then cached. Imports torch only to measure."""

from __future__ import annotations

import gc
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from attrs import fields

from moefw.compose.assembly import Assembly, ChosenPlugins
from moefw.core.errors import PlanError
from moefw.planner.report import Ledger


def ledger(assembly: Assembly, *, micro_batches: int | None = None, cache: Path | None = None) -> Ledger:
    """Ledger of a rank. ``micro_batches`` None: as many as the spec has.

    ``cache``: folder of earlier ledgers, under a digest of everything that they depend on; None: measure.
    """
    count = assembly.micro_batches if micro_batches is None else micro_batches
    if cache is None:
        return _measured(assembly, count)
    path = cache / f"{_digest(assembly, count)}.json"
    stored = _stored(path)
    if stored is not None:
        return stored
    measured = _measured(assembly, count)
    if not measured.unknown:  # what is missing may be installed later
        _store(path, measured)
    return measured


def _measured(assembly: Assembly, count: int) -> Ledger:
    with _without_garbage_collection():
        from moefw.planner.measure import measure

        return measure(assembly, count)


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Search for no cycles: imports and a measurement make few, and searching for them takes a tenth of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _stored(path: Path) -> Ledger | None:
    """Ledger in a file of the cache; None if it is missing, or not as :func:`_store` wrote it."""
    try:
        entry = json.loads(path.read_bytes())
        if entry["sha256"] != _hash(entry["ledger"]):
            return None
        return Ledger.of_data(entry["ledger"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _store(path: Path, measured: Ledger) -> None:
    """Write a ledger and a hash of it, whole or not at all. Does nothing if the folder cannot be written."""
    data = measured.to_data()
    entry = json.dumps({"ledger": data, "sha256": _hash(data)}).encode()
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


def _hash(data: Any) -> str:
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()


def _digest(assembly: Assembly, count: int) -> str:
    """Hash of what a ledger depends on: spec, world, facts, versions, frozen weights, code of the parts and moefw."""
    facts = [[number, sorted(layer.facts.items())] for number, layer in assembly.layers.items()]
    versions = [importlib.metadata.version("torch"), sys.version]
    files = [*_sources(assembly), *_weights(assembly)]
    return _hash([assembly.digest(), count, assembly.site.ranks_per_node, repr(facts), versions, files])


def _weights(assembly: Assembly) -> Iterator[Any]:
    """Yield path, size and time of every file that says as what frozen weights are held."""
    if assembly.frozen:
        for path in sorted(Path(assembly.spec.train.weights or "").glob("*.safetensors")):
            state = path.stat()
            yield str(path.absolute()), state.st_size, state.st_mtime_ns


def _sources(assembly: Assembly) -> Iterator[Any]:
    """Yield path, size and time of every source file of the packages of the parts, and of moefw."""
    parts = [getattr(assembly.parts, field.name) for field in fields(ChosenPlugins) if field.name != "memory"]
    names = {type(part).__module__.partition(".")[0] for part in (*parts, *assembly.parts.memory)}
    for name in sorted(names | {"moefw", "moefw_kernels"}):
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
