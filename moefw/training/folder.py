"""The folder of a run: checked and locked before any rank is started, and the seal of its spec."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

from attrs import evolve
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from moefw.compose.assembly import Assembly
from moefw.compose.local_files import OF_A_RUN, run_dir_problems
from moefw.core.errors import SpecError, os_reason
from moefw.system.folders import lock_folder

MANIFEST = "manifest.json"
MOST_NAMED = 10
"""Number of links in a run's folder that an error names."""


def checkpoint_dirs(run_dir: Path) -> list[tuple[int, Path]]:
    """Committed checkpoints of a run as (step, folder), oldest first.

    A ``step-N.replaced`` that a killed run left counts as the checkpoint of its step if there is no ``step-N``.
    """
    by_step: dict[int, Path] = {}
    with suppress(OSError), os.scandir(run_dir / "checkpoints") as listing:
        # One scan: with a query per folder, a run that saves and drops meanwhile could seem to have none.
        for entry in sorted(listing, key=lambda entry: entry.name):
            number = re.fullmatch(r"step-([0-9]+)(\.replaced)?", entry.name)
            if number and entry.is_dir():
                by_step.setdefault(int(number[1]), Path(entry.path))
    return sorted(by_step.items())


def unfinished_saves(run_dir: Path) -> list[str]:
    """Lines for the user on saves that are not finished, and so are no checkpoints: of a killed run, or under way."""
    left = (re.fullmatch(r"step-([0-9]+)\.tmp", path.name) for path in (run_dir / "checkpoints").glob("step-*.tmp"))
    steps = sorted(int(number[1]) for number in left if number)
    return [f"the save of step {step} was not finished: it is no checkpoint" for step in steps]


@contextmanager
def run_folder(assembly: Assembly, *, resume: bool, again: bool = False, tell: Callable[[str], None]) -> Iterator[None]:
    """Lock a run's folder for this process. Without ``resume``, move an earlier run in it aside.

    The earlier run is moved back if the new one leaves nothing. ``tell`` gets a line for the user on each move.
    ``again``: an earlier run with the same spec stays in place and starts anew. Raises SpecError if the folder cannot
    hold a run, or holds links: a run writes and deletes below its folder, and what a link names may be anything.
    """
    run_dir = Path(assembly.spec.run.dir)
    stays = resume or (again and is_same_run(run_dir, assembly))
    with ExitStack() as stack:
        try:
            problems = run_dir_problems(run_dir)
            if problems:
                raise SpecError(problems)
            aside = None if stays else _moved_aside(run_dir)
            run_dir.mkdir(parents=True, exist_ok=True)
            stack.enter_context(_locked(run_dir))
            _refuse_links(run_dir)
        except OSError as error:
            reason = os_reason(error)
            raise SpecError(f"run.dir {run_dir} cannot be written: {reason}.", "Use another run.dir.") from error
        stack.callback(_give_back, run_dir, aside, tell)
        if aside is not None:
            tell(f"{run_dir} held an earlier run: it is now {aside}")
        yield


def _refuse_links(run_dir: Path) -> None:
    """Raise SpecError if anything below the folder is neither a regular file nor a folder that can be read."""
    strange = sorted(_strange(run_dir))
    if strange:
        more = f", and {len(strange) - MOST_NAMED:,} more" if len(strange) > MOST_NAMED else ""
        named = ", ".join(strange[:MOST_NAMED]) + more
        what = f"run.dir {run_dir} may hold only regular files and folders, as a run follows no link in it: {named}."
        raise SpecError(what, "Remove what is named, or use another run.dir, which may itself be a link to a folder.")


def _strange(run_dir: Path) -> Iterator[str]:
    """Yield a description of each link, special file and folder that hides its content, below a folder."""
    waiting = [str(run_dir)]
    while waiting:
        folder = waiting.pop()
        try:
            entries = [*os.scandir(folder)]
        except PermissionError:
            if os.access(folder, os.X_OK):  # one that cannot be entered either, such as lost+found, leads nowhere
                yield f"{os.path.relpath(folder, run_dir)!r} cannot be read"
            continue
        for entry in entries:
            name = os.path.relpath(entry.path, run_dir)
            if entry.is_symlink():
                yield f"{name!r} is a link to {os.readlink(entry.path)!r}"
            elif entry.is_dir(follow_symlinks=False):
                waiting.append(entry.path)
            elif not entry.is_file(follow_symlinks=False):
                yield f"{name!r} is no regular file"


def is_same_run(run_dir: Path, assembly: Assembly) -> bool:
    """Whether the run in a folder was started with the same spec."""
    try:
        before = YAML(typ="safe").load(run_dir / "spec.yaml")
    except (OSError, ValueError, YAMLError):
        return False
    return bool(before == kept_spec(assembly))


def kept_spec(assembly: Assembly) -> dict[str, Any]:
    """Resolved spec as a run's folder keeps it, valid from any working directory."""
    parts = evolve(assembly.parts, data=assembly.parts.data.anchored(), adapter=assembly.parts.adapter.anchored())
    kept: dict[str, Any] = json.loads(json.dumps(evolve(assembly, parts=parts).resolved()))
    for path in ("weights", "replay_routes"):
        if kept["train"][path] is not None:
            kept["train"][path] = str(Path(kept["train"][path]).absolute())
    return kept


def _moved_aside(run_dir: Path) -> Path | None:
    """Rename the folder of an earlier run and return its new name; None if there is none."""
    if not run_dir.exists() or not any(run_dir.iterdir()):
        return None
    if run_dir.is_symlink():
        what = f"run.dir {run_dir} is a link to {run_dir.readlink()}, and an earlier run there is not moved aside."
        raise SpecError(what, "Move the earlier run, or use another run.dir.")
    with _locked(run_dir):
        aside = next(p for p in (run_dir.with_name(f"{run_dir.name}.{n}") for n in count(1)) if not p.exists())
        return run_dir.rename(aside)


def _give_back(run_dir: Path, aside: Path | None, tell: Callable[[str], None]) -> None:
    """Move the earlier run back if the new one has left nothing."""
    with suppress(OSError):
        run_dir.rmdir()  # fails if it is not empty
        if aside is not None:
            aside.rename(run_dir)
            tell(f"{aside} is {run_dir} again")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a lock on a folder, which ends with the process. Do nothing if the file system has no locks."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        lock_folder(descriptor, fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise SpecError(f"run.dir {folder} is that of a run under way.", "Use another run.dir, or stop it.") from error
    try:
        yield
    finally:
        os.close(descriptor)


def sealed(text: str) -> str:
    """Spec, which ends with a newline, with its seal: a YAML comment."""
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
