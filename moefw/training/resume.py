"""Choice of the checkpoint that a run resumes from. Imports no torch: the command line calls it before ranks start."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal, cast, get_args

from moefw.core.errors import CheckpointError, SpecError, nearest
from moefw.training.folder import checkpoint_dirs, unfinished_saves

Word = Literal["last", "last-good", "auto"]
Which = Word | int
"""The newest checkpoint; the newest intact one; the newest if there is one, else none; or that of a step."""


def is_choice(text: str) -> bool:
    """Whether ``--resume=TEXT`` names a checkpoint."""
    return re.fullmatch(r"[0-9]{1,18}", text) is not None or text in get_args(Word)


def read_which(text: str) -> Which:
    """Choice that ``--resume=TEXT`` names. Raises SpecError if it names none."""
    if not is_choice(text):
        what = f"--resume={text} names no checkpoint."
        raise SpecError(what, f"{nearest(text, get_args(Word))} A number is the step that a checkpoint was saved at.")
    return int(text) if text.isdecimal() else cast(Word, text)


def candidates(run_dir: Path, which: Which) -> list[tuple[int, Path]]:
    """Checkpoints that a run may resume from as (step, folder), in the order to try them.

    Empty if ``auto`` starts anew. Raises CheckpointError if there is none to resume from.
    """
    saved = checkpoint_dirs(run_dir)[::-1]
    if not saved:
        if which == "auto":
            return []
        what = "; ".join([f"{run_dir} holds no checkpoint", *unfinished_saves(run_dir)]) + "."
        raise CheckpointError(what, "Check the path; train without --resume to start a run there.")
    if isinstance(which, int):
        of_step = [(step, folder) for step, folder in saved if step == which]
        if not of_step:
            there = ", ".join(str(step) for step, _ in reversed(saved))
            raise CheckpointError(f"{run_dir} holds no checkpoint of step {which}.", f"There are those of {there}.")
        return of_step
    return saved if which == "last-good" else saved[:1]
