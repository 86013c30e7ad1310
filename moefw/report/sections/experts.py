"""The load of experts, and how sure routers are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moefw.report.blocks import Block, Section, Table, Words, missing
from moefw.report.charts import ACCENT, CONTRAST, MUTED, Charts, Curve
from moefw.report.reading import Run
from moefw.report.sections.curves_of_runs import curves_of, extremes, marks
from moefw.report.words import number

MOST_HOT = 12
MOST_DEAD = 200
LOAD = "Expert load"
ENTROPY = "Router entropy"


def load(runs: Sequence[Run], charts: Charts) -> Section:
    """Heat maps of layers by experts, percentiles over layers, hot and dead experts."""
    if not any(run.windows or run.buckets.get("busiest/most") for run in runs):
        note = missing("No load of experts was recorded.", "A model with MoE layers (model.num_experts) records it.")
        return Section("expert-load", LOAD, [note])
    blocks: list[Block] = []
    for run in runs:
        of_run = "" if len(runs) == 1 else f", {run.name}"
        if run.windows:
            blocks.append(charts.heat_map(f"Load by layer and expert{of_run}", run.windows))
    alone = len(runs) == 1
    if alone and runs[0].buckets.get("busiest/most"):
        (run,) = runs
        curves = [
            Curve(run, "busiest/most", "busiest expert of the worst layer", CONTRAST),
            Curve(run, "busiest/p90", "busiest, 90th percentile of layers", "--series-5"),
            Curve(run, "busiest/median", "busiest, median layer", ACCENT),
            Curve(run, "idlest/median", "idlest, median layer", MUTED),
            Curve(run, "idlest/least", "idlest expert of the worst layer", "--series-4"),
        ]
        unit = "share of tokens in a step, 1.0 is fair"
        blocks.append(charts.curves("Over all layers", curves, unit=unit, marks=marks(runs), from_zero=True))
    elif not alone:
        busiest = curves_of(runs, "busiest/most", "")
        if busiest:
            unit = "share of tokens in a step, 1.0 is fair"
            blocks.append(charts.curves("Busiest expert of the worst layer", busiest, unit=unit, from_zero=True))
    names = {
        "busiest/most": "busiest expert, worst layer",
        "busiest/median": "busiest expert, median layer",
        "idlest/least": "idlest expert, worst layer",
        "load_entropy/median": "entropy of the load, median layer",
        "load_entropy/least": "entropy of the load, worst layer",
        "dead/sum": "experts without a token in the step",
    }
    table = extremes(runs, names, "in a step")
    blocks += [table] if table else []
    for run in runs:
        blocks += _hot_and_dead(run, "" if alone else f", {run.name}")
    return Section("expert-load", LOAD, blocks)


def _hot_and_dead(run: Run, of_run: str) -> list[Block]:
    """The busiest experts of the last window, and those without a token in it."""
    if not run.windows:
        return []
    window = run.windows[-1]
    steps = f"steps {window.first:,} to {window.last:,}" if window.last > window.first else f"step {window.last:,}"
    order = np.argsort(-window.load_LE, axis=None, kind="stable")
    num_experts = window.load_LE.shape[1]

    def row(cell: int) -> list[str]:
        layer, expert = divmod(cell, num_experts)
        return [str(window.layers[layer]), str(expert), number(float(window.load_LE[layer, expert]))]

    hot = [row(int(cell)) for cell in order[:MOST_HOT]]
    dead = [row(int(cell))[:2] for cell in np.flatnonzero(window.load_LE == 0)]
    blocks: list[Block] = [
        Table(
            title=f"Busiest experts in {steps}{of_run}",
            head=["layer", "expert", "share, 1.0 is fair"],
            rows=hot,
            texts=(),
        )
    ]
    if not dead:
        return [*blocks, Words([f"No expert was without a token in {steps}{of_run}."], quiet=True)]
    title = f"{len(dead):,} of {window.load_LE.size:,} experts without a token in {steps}{of_run}"
    return [*blocks, Table(title=title, head=["layer", "expert"], rows=dead[:MOST_DEAD], texts=(), visible=MOST_HOT)]


def entropy(runs: Sequence[Run], charts: Charts) -> Section:
    """Entropy of routers' scores over steps: 1.0 is undecided, 0 is one expert."""
    if not any(run.buckets.get("router_entropy/median") for run in runs):
        how = "Routers that return scores record it in runs of this version, if the model has MoE layers."
        return Section("router-entropy", ENTROPY, [missing("No router entropy was recorded.", how)])
    names = {
        "router_entropy/least": "surest layer",
        "router_entropy/median": "median layer",
        "router_entropy/most": "least sure layer",
    }
    if len(runs) == 1:
        roles = (CONTRAST, ACCENT, MUTED)
        curves = [Curve(runs[0], name, label, role) for (name, label), role in zip(names.items(), roles)]
    else:
        curves = curves_of(runs, "router_entropy/median", "")
    unit = "mean over tokens, over ln E: 1.0 is undecided, 0 is one expert"
    title = ENTROPY if len(runs) == 1 else f"{ENTROPY}, median layer"
    blocks: list[Block] = [charts.curves(title, curves, unit=unit, marks=marks(runs), height=220)]
    table = extremes(runs, names, "of")
    blocks += [table] if table else []
    if len(runs) == 1 and (last := runs[0].layer_lists.get("router_entropy")):
        layers = runs[0].windows[-1].layers if runs[0].windows else tuple(range(len(last)))
        rows = [[str(layer), number(value)] for layer, value in zip(layers, last)]
        title = f"By layer, in step {runs[0].buckets.last_step:,}"
        blocks.append(Table(title=title, head=["layer", "entropy"], rows=rows, texts=(), visible=12))
    return Section("router-entropy", ENTROPY, blocks)
