"""What is wrong with files and folders of this machine that a spec names, told before a run opens them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from moefw.compose.spec.unknown import is_known
from moefw.core.errors import Problem

OF_A_RUN = ("spec.yaml", "metrics.jsonl", "ledger.json", "checkpoints", "stacks")
"""A folder that holds any of these names is the folder of a run."""
WEIGHTS = "train.weights"
ROUTES = "train.replay_routes"
RUN_DIR = "run.dir"


def file_problems(weights: str | None, replay_routes: str | None, run_dir: str) -> Iterator[Problem]:
    """Yield what is wrong with the files of a spec that are no data. Values that are not known are left out."""
    if weights is not None and is_known(weights):
        yield from weights_problems(Path(weights))
    if replay_routes is not None and is_known(replay_routes) and not Path(replay_routes).is_dir():
        yield Problem(f"{replay_routes} is no folder.", "Name the routes that train.record_routes wrote.", ROUTES)
    if is_known(run_dir):
        yield from _unwritable(Path(run_dir)) or run_dir_problems(Path(run_dir))


def weights_problems(folder: Path) -> Iterator[Problem]:
    """Yield why a folder holds no weights of Hugging Face. No file is opened."""
    fix = "Name a Hugging Face folder: config.json, and weights in safetensors files."
    if not folder.is_dir():
        yield Problem(f"{folder} {'is no folder' if folder.exists() else 'does not exist'}.", fix, WEIGHTS)
        return
    if not (folder / "config.json").exists():
        yield Problem(f"{folder} holds no config.json.", fix, WEIGHTS)
    if not any(folder.glob("*.safetensors")):
        yield Problem(f"{folder} holds no safetensors files.", fix, WEIGHTS)


def run_dir_problems(run_dir: Path) -> list[Problem]:
    """Why a folder is not one for a run. Raises OSError if it cannot be read."""
    if run_dir.is_symlink() and not run_dir.is_dir():
        what = f"{run_dir} is a link to {run_dir.readlink()}, which is no folder."
        return [Problem(what, f"Make that folder, or use another {RUN_DIR}.", RUN_DIR)]
    is_strange = run_dir.is_dir() and any(run_dir.iterdir()) and not any((run_dir / name).exists() for name in OF_A_RUN)
    if is_strange:
        return [Problem(f"{run_dir} holds something else than a run.", f"Use another {RUN_DIR}.", RUN_DIR)]
    return []


def _unwritable(run_dir: Path) -> list[Problem]:
    """Why no folder can be made or written there, as far as that is known without doing it."""
    there = next(path for path in (run_dir, *run_dir.absolute().parents) if os.path.exists(path))
    why = ""
    if not there.is_dir():
        why = "not a directory"
    elif not os.access(there, os.R_OK | os.W_OK | os.X_OK):
        why = "permission denied"
    return [Problem(f"{run_dir} cannot be written: {why}.", f"Use another {RUN_DIR}.", RUN_DIR)] if why else []
