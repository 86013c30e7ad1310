"""Prints what is predicted of a spec, as tables and lines."""

from __future__ import annotations

import click
from rich.console import Console

from moefw.commands.tables import print_table
from moefw.planner import cluster as clusters
from moefw.planner.comparison import Comparison
from moefw.planner.prediction import Prediction
from moefw.planner.report import Ledger
from moefw.planner.sheets import GIGA, Sheet, on_cluster_in_words, sheets, step_in_words, time_of_step, what_to_try
from moefw.planner.time.forecast import HOW_TO_ADD


def show(plan: Ledger) -> None:
    """Print the tables of a plan, as plain lines if not on a terminal."""
    tokens = f"{plan.tokens} tokens a micro-batch, {plan.micro_batches} a step"
    click.echo(f"memory of {plan.ranks}; {tokens}")
    for sheet in sheets(plan):
        show_sheet(sheet)
    if plan.flops_per_token is not None:
        click.echo(f"\nthe model asks for {plan.flops_per_token / GIGA:.3f} GFLOP a token, in forward and backward")
    for part in plan.modelled:
        click.echo(f"modelled, as it cannot run here: {part}")
    if plan.unknown:
        click.echo(f"\nunknown here is what waits for backward, the peak, and the work: {plan.unknown}")


def show_prediction(prediction: Prediction) -> None:
    """Print a plan, what it is on its cluster, what to try there, and what tokens cost."""
    show(prediction.plan)
    if prediction.notes:
        click.echo("\n" + "\n".join(prediction.notes))
    _show_on_cluster(prediction)
    if prediction.advice:
        show_sheet(what_to_try(prediction.advice))
    if prediction.budget is not None:
        click.echo(f"\n{prediction.budget.in_words()}")


def _show_on_cluster(prediction: Prediction) -> None:
    """Print whether the peak fits a GPU of the cluster, and the time of a step, or what the cluster lacks for it.

    Without a cluster, how to ask for that.
    """
    circumstances = prediction.circumstances
    if circumstances.cluster is None:
        names = ", ".join([*clusters.names(), *clusters.own_names()])
        click.echo(f"\n--cluster NAME says how long a step takes and what to try. There are {names};")
        click.echo("`moefw bench calibrate` adds this machine.")
        return
    lines = on_cluster_in_words(circumstances.cluster, circumstances.cluster_name, prediction.plan)
    click.echo("\n" + "\n".join(lines))
    if prediction.lacking:
        lacking = ", ".join(prediction.lacking)
        click.echo(f"\nThe time of a step is not predicted: the cluster has no {lacking}. {HOW_TO_ADD}")
    if prediction.time is not None:
        show_sheet(time_of_step(prediction.time))
        click.echo("\n" + "\n".join(step_in_words(prediction.time)))


def show_comparison(comparison: Comparison) -> None:
    """Print two predictions beside each other."""
    for letter, asked in zip("AB", comparison.asked, strict=True):
        click.echo(f"{letter}: {asked}")
    if not comparison.differences:
        click.echo("\nthe specs are the same, but for run.dir")
    for sheet in comparison.sheets():
        show_sheet(sheet)
    if comparison.in_words():
        click.echo("\n" + "\n".join(comparison.in_words()))


def show_sheet(sheet: Sheet) -> None:
    """Print a table below an empty line."""
    click.echo()
    print_table(Console(markup=False, highlight=False), sheet.head, sheet.rows)
