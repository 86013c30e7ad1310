"""A page about a plan, or about two beside each other, of the parts of a page about runs. It has no scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moefw.compose.spec.leaves import leaves, shown
from moefw.planner.comparison import Comparison
from moefw.planner.prediction import Prediction
from moefw.planner.report import Ledger
from moefw.planner.sheets import (
    NOTHING,
    Sheet,
    at_the_peak,
    by_region,
    memory_by_category,
    on_cluster_in_words,
    positions,
    sent,
    step_in_words,
    work_by_pass,
)
from moefw.planner.time.forecast import HOW_TO_ADD, Forecast
from moefw.report.blocks import Bars, Block, Facts, Section, Table, Words, bars
from moefw.report.rendering import rendered
from moefw.report.words import count, duration, several, share, size

TEXTS: Mapping[str, Sequence[int]] = {"region": (0, 1), "sent": (0, 2), "differences": (0, 1, 2)}
"""Columns of text of each table; of others the first one."""


TITLES: Mapping[str, str] = {
    "differences": "What is different",
    "memory": "Memory",
    "work": "Work",
    "seconds": "Time of a step",
}


def plan_page(prediction: Prediction, origin: str) -> str:
    """HTML about a plan. ``origin``: the spec and its overrides."""
    sections = [
        _answer(prediction),
        _step(prediction),
        _to_try(prediction),
        _memory(prediction.plan),
        _work(prediction.plan),
        _spec(prediction),
    ]
    about = [prediction.circumstances.cluster_name or "", count(prediction.plan.world, "rank")]
    return _page(origin, " · ".join(filter(None, about)), [section for section in sections if section.blocks])


def comparison_page(comparison: Comparison) -> str:
    """HTML about two plans beside each other."""
    tables = [Section(sheet.title, TITLES[sheet.title], [_table(sheet)]) for sheet in comparison.sheets()]
    named = [f"{letter}: {asked}" for letter, asked in zip("AB", comparison.asked, strict=True)]
    blocks: list[Block] = [Words([*named, *comparison.in_words()]), *_steps(comparison)]
    outcome = Section("outcome", "Outcome", blocks)
    cluster = comparison.predictions[0].circumstances.cluster_name
    return _page(several(comparison.asked), cluster or "", [outcome, *tables])


def _page(origin: str, about: str, sections: Sequence[Section]) -> str:
    return rendered(of="moefw plan", title=origin, about=about, sections=sections, origin=origin)


def _answer(prediction: Prediction) -> Section:
    """What the page says in short: how long a step takes, what bounds it, and whether it fits."""
    rows: list[tuple[str, str]] = []
    plan = prediction.plan
    time = prediction.time
    circumstances = prediction.circumstances
    if time is not None:
        rows.append(("Step", f"{duration(time.step.step_s)}, give or take {time.bar.percent:.0f} %"))
        rows.append(("Speed", f"{time.tokens_per_s_per_gpu:,.0f} tokens/s a GPU"))
        rows.append(("MFU", share(time.mfu)))
        longest = time.step.categories[time.step.bound_by] / time.step.step_s
        rows.append(("Longest", f"{time.step.bound_by}, {share(longest)} of the step"))
    rows.append(("Peak of a rank", size(plan.peak_bytes) if plan.peak_bytes is not None else "unknown"))
    if circumstances.cluster is not None:
        fits, *_ = on_cluster_in_words(circumstances.cluster, circumstances.cluster_name, plan)
        rows.append(("Fit", fits))
    tokens = f"{plan.tokens:,} a micro-batch, {plan.micro_batches:,} micro-batches a step"
    rows.append(("Tokens", tokens))
    rows += [("Modelled", part) for part in plan.modelled]
    blocks: list[Block] = [Facts(rows)]
    if plan.unknown:
        blocks.append(Words([f"The peak and the work are unknown: {plan.unknown}"], quiet=True))
    if prediction.lacking:
        what = f"No time of a step: the cluster has no {several(prediction.lacking)}. {HOW_TO_ADD}"
        blocks.append(Words([what], quiet=True))
    if prediction.notes:
        blocks.append(Words([f"{note[0].upper()}{note[1:]}." for note in prediction.notes], quiet=True))
    if prediction.budget is not None:
        blocks.append(Words(prediction.budget.in_words().splitlines()))
    return Section("outcome", "Outcome", blocks)


def _step(prediction: Prediction) -> Section:
    """What a step spends its time on."""
    time = prediction.time
    blocks: list[Block] = []
    if time is not None:
        blocks = [bars("A step spends on", time.step.longest_first, duration), Words(_sure(time), quiet=True)]
    return Section("time", "Time of a step", blocks)


def _sure(time: Forecast) -> list[str]:
    side_by_side = "Costs run side by side in part, so that their sum is more than the step."
    bar = f"The step takes between {_times(time, -1)} and {_times(time, 1)} in four of five cases like it."
    _, *bounds = step_in_words(time)
    return [bar, side_by_side, *(f"{line[0].upper()}{line[1:]}." for line in bounds)]


def _times(time: Forecast, sign: int) -> str:
    """Time of a step at one end of its error bar."""
    return duration(time.step.step_s * (1 + sign * time.bar.percent / 100))


def _steps(comparison: Comparison) -> list[Bars]:
    """Times of both steps as bars; none if that of one is unknown."""
    a, b = (each.time for each in comparison.predictions)
    if a is None or b is None:
        return []
    return [bars("A step takes", {"A": a.step.step_s, "B": b.step.step_s}, duration)]


def _to_try(prediction: Prediction) -> Section:
    """What to try against each cost, with the reason and its source."""
    rows = []
    for each in prediction.advice:
        trials = [(trial.pasted, trial.because, trial.source) for trial in each.trials] or [(NOTHING, "", "")]
        rows += [(each.category, f"{100 * each.gain:.1f} %", *trial) for trial in trials]
    if not rows:
        return Section("try", "What to try", [])
    said = Words(
        ["Without a cost, a step would be shorter by so much at most. Paste a change behind the spec to plan with it."],
        quiet=True,
    )
    head = ("against", "saves at most", "change of the spec", "because", "see")
    return Section("try", "What to try", [said, Table(head=head, rows=rows, texts=(0, 2, 3, 4))])


def _memory(plan: Ledger) -> Section:
    """Memory of a rank by category, at its peak, by region, and by position on pp."""
    by_category = bars(f"Memory of {plan.ranks}", memory_by_category(plan), size)
    sheets = [sheet for sheet in (at_the_peak(plan), by_region(plan), positions(plan)) if sheet.rows]
    return Section("memory", "Memory", [by_category, *map(_table, sheets)])


def _work(plan: Ledger) -> Section:
    """What a rank multiplies, and what it sends by link."""
    sheets = [sheet for sheet in (work_by_pass(plan), sent(plan)) if sheet.rows]
    return Section("work", "Work and transfers", [_table(sheet) for sheet in sheets])


def _table(sheet: Sheet) -> Table:
    return Table(head=sheet.head, rows=sheet.rows, texts=TEXTS.get(sheet.title, (0,)))


def _spec(prediction: Prediction) -> Section:
    """Every value of the resolved spec."""
    rows = [(key, shown(value)) for key, value in leaves(prediction.assembly.resolved()).items()]
    table = Table(title="All values", head=("key", "value"), rows=rows, texts=(0, 1), visible=0)
    return Section("spec", "Spec", [table])
