"""What a run's checkpoints hold: for ``moefw inspect``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from attrs import frozen

from moefw.core.errors import DataError
from moefw.training.checkpoint import format2
from moefw.training.checkpoint.manifest import FORMAT, Damage
from moefw.training.checkpoint.reading import Reader, opened
from moefw.training.records.events import EVENTS, STARTS, read_events
from moefw.training.records.json_lines import Record


@frozen(kw_only=True)
class StoredBox:
    """A box of a tensor: the file that holds it, the index of its first element in the tensor, and its shape."""

    file: str
    corner: tuple[int, ...]
    shape: tuple[int, ...]


@frozen(kw_only=True)
class Held:
    """Tensors of one kind in a checkpoint: ``model``, ``state``, or ``optimizer/`` and the key of a state."""

    kind: str
    tensors: int
    parts: int
    elements: int
    nbytes: int


@frozen(kw_only=True, eq=False)
class Inspected:
    """A checkpoint. ``reader``: None if ``damage`` keeps it from being read. ``damage``: empty if none was found."""

    reader: Reader | None
    damage: str


def inspect(folder: Path, *, verify: bool) -> Inspected:
    """Checkpoint in a folder. Its manifest and indexes are verified; with ``verify``, all of its bytes."""
    reader = None
    try:
        reader = opened(folder)
        if verify:
            reader.verify()
    except Damage as damage:
        return Inspected(reader=reader, damage=str(damage))
    return Inspected(reader=reader, damage="")


def format_of(reader: Reader) -> int:
    """Number of the format of a checkpoint."""
    return format2.FORMAT if isinstance(reader.manifest, format2.OldManifest) else FORMAT


def size_of(reader: Reader) -> int:
    """Bytes of the files of a checkpoint that are there."""
    paths = [reader.folder / file.file for file in reader.files]
    return sum(path.stat().st_size for path in paths if path.exists())


def held_by(reader: Reader) -> list[Held]:
    """Tensors of a checkpoint by kind, as they are stored: a scalar that has the value of another one has no part."""
    names: dict[str, list[str]] = {}
    for name in reader.tensors:
        names.setdefault(_kind(name), []).append(name)
    parts = [part for file in reader.files for part in file.parts]
    return [
        Held(
            kind=kind,
            tensors=len(of_kind),
            parts=sum(_kind(part.name) == kind for part in parts),
            elements=sum(math.prod(reader.tensors[name].shape) for name in of_kind),
            nbytes=sum(part.nbytes for part in parts if _kind(part.name) == kind),
        )
        for kind, of_kind in sorted(names.items())
    ]


def boxes_in(reader: Reader) -> dict[str, list[StoredBox]]:
    """Parts of each tensor of a checkpoint by name, in the order of their corners."""
    boxes: dict[str, list[StoredBox]] = {name: [] for name in reader.tensors}
    for file in reader.files:
        for part in file.parts:
            for name in (part.name, *file.same.get(part.name, ())):
                boxes[name].append(StoredBox(file=file.file, corner=part.corner, shape=part.shape))
    return {name: sorted(of_name, key=lambda box: box.corner) for name, of_name in boxes.items()}


def starts_of(run_dir: Path) -> Mapping[int, Record]:
    """The event of the start of the run that saved each checkpoint, by step; without those that no event tells."""
    starts: dict[int, Record] = {}
    start: Record | None = None
    with suppress(DataError):  # what a checkpoint holds does not depend on the records
        for event in read_events(run_dir / EVENTS):
            if event["event"] in STARTS:
                start = event
            elif event["event"] in ("checkpoint", "stop") and start is not None:
                starts[event["step"]] = start
    return starts


def _kind(name: str) -> str:
    """The first word of a tensor's name; of an optimizer's state, with its key."""
    words = name.split("/", 2)
    return "/".join(words[:2]) if words[0] == "optimizer" else words[0]
