"""Seal of a run's ``spec.yaml``: its last line is the hash of those above. A changed digit may change the model."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from moefw.core.errors import SpecError
from moefw.training.folder import OF_A_RUN


def sealed(text: str) -> str:
    """Return a spec, which ends with a newline, with its seal: a YAML comment."""
    return f"{text}{_seal(text.encode())}"


def check_seal(path: Path) -> None:
    """Raise SpecError if the spec in a run's folder differs from the sealed one. One without a seal passes."""
    if not any(path.with_name(name).exists() for name in OF_A_RUN if name != path.name):
        return
    text, line_end, seal = path.read_bytes().rstrip(b"\n").rpartition(b"\n")
    if re.fullmatch(rb"# sha256 [0-9a-f]{64}", seal) and seal.decode() != _seal(text + line_end).strip():
        what = f"{path} has changed since the run wrote it: its last line is the hash of another text."
        raise SpecError(what, "Give changes as key=value, or delete that line if the file is as it should be.")


def _seal(text: bytes) -> str:
    return f"# sha256 {hashlib.sha256(text).hexdigest()}\n"
