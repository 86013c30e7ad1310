"""Where a run starts: from new weights, from those of a Hugging Face folder, or from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import evolve, field, frozen

from moefw.compose.pretrained import read_weights
from moefw.system.stamps import stamp
from moefw.training import checkpoint
from moefw.training.feed import Feed
from moefw.training.folder import unfinished_saves
from moefw.training.resume import Which
from moefw.training.session import Session


@frozen(kw_only=True)
class Start:
    """Where a run starts. ``step`` is the first one that it trains, from 0, and ``feed`` reads what it trains on.

    ``resumes``: whether it was asked to go on, also if there was nothing yet to go on from. ``checkpoint``: the folder
    that it goes on from; None: it begins anew. ``not_carried_on``: counts of the states of the checkpoint that are
    dropped, and of those that begin fresh. ``notes``: lines for the user.
    """

    step: int
    feed: Feed
    resumes: bool
    checkpoint: Path | None = None
    not_carried_on: Mapping[str, Mapping[str, int]] = field(factory=dict)
    notes: Sequence[str] = ()


def start_of(
    session: Session,
    optimizer: torch.optim.Optimizer,
    feed: Feed,
    *,
    which: Which | None,
    base: checkpoint.Base | None,
) -> Start:
    """The start of a run, after its model and optimizer are filled from where it starts. Collective.

    ``which``: the checkpoint to resume from; None: none. ``base``: the folder of frozen weights, which no checkpoint
    holds. Raises CheckpointError if the run cannot resume.
    """
    chosen = checkpoint.choose_together(session.run_dir, which, session.data, session.layout.host_group())
    unfinished = unfinished_saves(session.run_dir)
    if chosen is None:
        _read_weights(session)
        return Start(step=0, feed=feed, resumes=which is not None, notes=unfinished)
    if base is not None:
        _read_weights(session, frozen_alone=True)
    loaded = checkpoint.load(
        chosen.folder,
        session.model,
        optimizer,
        tokenizer=session.data.fingerprint,
        base=base,
        fresh_optimizer=session.assembly.spec.train.fresh_optimizer,
        group=session.layout.host_group(),
    )
    manifest = loaded.manifest
    set_aside = checkpoint.set_aside_after(session.run_dir, manifest.step) if session.leads else []
    return Start(
        step=manifest.step,
        feed=_behind(feed, sequences=manifest.origin.sequences, step=manifest.step),
        resumes=True,
        checkpoint=chosen.folder,
        not_carried_on=loaded.differences.counts(),
        notes=[*unfinished, *chosen.passed, *set_aside, *loaded.differences.notes(chosen.folder.name)],
    )


def _behind(feed: Feed, *, sequences: int, step: int) -> Feed:
    """``feed``, whose step ``step`` begins behind so many ``sequences``."""
    order: Any = evolve(feed.order, begin=sequences - feed.order.first(step))
    return evolve(feed, order=order)


def _read_weights(session: Session, *, frozen_alone: bool = False) -> None:
    """Read the weights of a Hugging Face folder, or the frozen ones, if the spec names one. Collective."""
    weights = session.assembly.spec.train.weights
    if weights is not None:
        stamp("reading weights", slow=True)
        group = session.layout.host_group()
        read_weights(session.model, Path(weights), session.assembly, group, frozen_alone=frozen_alone)
