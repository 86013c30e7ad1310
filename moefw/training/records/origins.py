"""Where each value of ``spec.yaml`` came from: ``origins.json``, one JSON object beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from moefw.system.files import replaced_file

ORIGINS: Final = "origins.json"


def write_origins(path: Path, origins: Mapping[str, str]) -> None:
    """Write the origin of each value by its key path. Raises OSError."""
    with replaced_file(path) as scratch:
        scratch.write_text(json.dumps(origins, indent=1), encoding="utf-8")


def read_origins(path: Path) -> dict[str, str]:
    """Origin of each value by its key path; empty if there is no file, as in older runs, or a damaged one."""
    try:
        origins: dict[str, str] = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return origins
