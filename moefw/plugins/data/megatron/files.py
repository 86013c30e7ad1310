"""The two files of an indexed dataset."""

from __future__ import annotations

from pathlib import Path

from moefw.plugins.data.options import absolute


def pair(path: str) -> tuple[Path, Path]:
    """File of ids and the index."""
    root = absolute(path).removesuffix(".bin").removesuffix(".idx")
    return Path(f"{root}.bin"), Path(f"{root}.idx")
