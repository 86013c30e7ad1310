"""The loss, evaluations, and what is added to the loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from moefw.report.blocks import Block, Section, Table, missing
from moefw.report.charts import CONTRAST, MUTED, Charts, Curve, Points
from moefw.report.reading import Run
from moefw.report.sections.curves_of_runs import curves_of, marks, role_of, series
from moefw.report.words import UNKNOWN, number, readable, share

UNIT = "nats a token"


def section(runs: Sequence[Run], charts: Charts) -> Section:
    """Loss over steps, evaluations in a picture and a table, the terms of the loss, and the learning rate."""
    blocks: list[Block] = []
    losses = curves_of(runs, "loss", "training")
    evals = [points for run in runs if (points := _evaluations(run, runs))]
    if losses:
        blocks.append(
            charts.curves(
                "Loss", losses, unit=UNIT, points=evals, marks=marks(runs), log=True, smoothed=True, height=340
            )
        )
    else:
        blocks.append(missing("No step has a finite loss.", "The table of events may say why."))
    blocks += _bits(runs, charts)
    if any(run.evaluations for run in runs):
        blocks.append(_table(runs))
    else:
        blocks.append(missing("There was no evaluation.", "train.eval_every asks for them."))
    blocks += _terms(runs, charts)
    rates = curves_of(runs, "lr", "learning rate")
    if rates:
        blocks.append(charts.curves("Learning rate", rates, unit="", from_zero=True, height=150))
    return Section("loss", "Loss", blocks)


def _evaluations(run: Run, runs: Sequence[Run]) -> Points | None:
    known = [one for one in run.evaluations if one.loss is not None and math.isfinite(one.loss)]
    if not known:
        return None
    steps = [one.step for one in known]
    values: list[Any] = [one.loss for one in known]
    if len(runs) == 1:
        return Points(steps, values, "held-out text", CONTRAST)
    return Points(steps, values, f"{run.name}, held-out", role_of(run, runs))


def _bits(runs: Sequence[Run], charts: Charts) -> list[Block]:
    """Evaluations in bits a byte beside zlib's, if there are at least two."""
    points = []
    for run in runs:
        known: list[Any] = [
            one for one in run.evaluations if one.bits_per_byte is not None and math.isfinite(one.bits_per_byte)
        ]
        if known:
            label = "held-out text" if len(runs) == 1 else run.name
            bits = [one.bits_per_byte for one in known]
            points.append(Points([one.step for one in known], bits, label, role_of(run, runs)))
    if sum(len(dots.steps) for dots in points) < 2:
        return []
    zlib = {
        event["zlib_bits_per_byte"]
        for run in runs
        for event in run.of("evaluation")
        if isinstance(event.get("zlib_bits_per_byte"), int | float)
    }
    lines = [(value, f"zlib -9: {number(value)}", MUTED) for value in sorted(zlib)[:1] if len(zlib) == 1]
    return [charts.curves("Held-out text", [], unit="bits a byte", points=points, lines=lines, height=220)]


def _table(runs: Sequence[Run]) -> Table:
    names = len(runs) > 1
    head = [*(["run"] if names else []), "after step", "nats a token", "bits a byte"]
    rows = [
        [*([run.name] if names else []), f"{one.step:,}", number(one.loss), number(one.bits_per_byte)]
        for run in runs
        for one in run.evaluations
    ]
    return Table(title="Evaluations of held-out text", head=head, rows=rows, texts=(0,) if names else (), visible=12)


def _terms(runs: Sequence[Run], charts: Charts) -> list[Block]:
    """What is trained besides the loss: each term, and its share of the sum."""
    names = dict.fromkeys(
        name.removeprefix("loss_shares/") for run in runs for name in run.buckets.names("loss_shares/")
    )
    if not names:
        return []
    rows = []
    for run in runs:
        for name in names:
            term = run.buckets.get(name)
            part = run.buckets.get(f"loss_shares/{name}")
            if part is not None:
                last = number(term.last) if term else UNKNOWN
                rows.append(
                    [
                        *([run.name] if len(runs) > 1 else []),
                        readable(name),
                        last,
                        share(part.last),
                        share(part.highest[0]),
                    ]
                )
    head = [*(["run"] if len(runs) > 1 else []), "term", "last", "share of the sum", "at most"]
    texts = (0, 1) if len(runs) > 1 else (0,)
    title = "Terms beside the loss"
    blocks: list[Block] = []
    if len(runs) == 1:
        curves = [
            Curve(runs[0], f"loss_shares/{name}", readable(name), series(place)) for place, name in enumerate(names)
        ]
        blocks.append(charts.curves(title, curves, unit="share of the sum of loss and terms", height=200))
    # The table is below the curves of one run; of several it stands alone.
    return [*blocks, Table(title="" if blocks else title, head=head, rows=rows, texts=texts)]
