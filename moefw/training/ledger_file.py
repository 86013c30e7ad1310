"""``ledger.json`` in a run's folder: the predicted and the measured memory."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from moefw.compose.assembly import Assembly
from moefw.system.files import replaced_file
from moefw.training.full_disk import written


def path_of(assembly: Assembly) -> Path:
    """Path of the file."""
    return Path(assembly.spec.run.dir) / "ledger.json"


def write(assembly: Assembly, **entries: dict[str, Any] | str | None) -> None:
    """Add entries, such as ``predicted`` or ``measured``, to the file, and remove those that are None. In bytes.

    Raises RunError if it cannot be written.
    """
    path = path_of(assembly)
    known = read(path)
    with written(path), replaced_file(path) as scratch:
        kept = {name: entry for name, entry in (known | entries).items() if entry is not None}
        scratch.write_text(json.dumps(kept, indent=1))


def read(path: Path) -> dict[str, Any]:
    """Entries of a file; empty if it is not there or damaged: all of them are measured again."""
    with suppress(OSError, ValueError):
        entries = json.loads(path.read_bytes())
        if type(entries) is dict:
            return entries
    return {}
