"""The layout: ranks, and the groups in which they work together."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from moefw.core.errors import MoefwError
from moefw.plugins.parallel.folded import DenseMesh, ExpertMesh, Folded
from moefw.report.blocks import Block, Facts, Section, Table, Words, missing
from moefw.report.charts import Charts
from moefw.report.reading import Record, Run
from moefw.report.words import count, several
from moefw.runtime.parallel.meshes import DENSE, EXPERT, MeshPlan

AXES = {
    "pp": "pp: stages of the pipeline",
    "dp": "dp: different sequences",
    "cp": "cp: parts of a sequence",
    "tp": "tp: parts of the matrices",
    "edp": "edp: copies of the experts",
    "ep": "ep: different experts",
    "etp": "etp: parts of an expert",
}
MOST_RANKS = 64


def section(runs: Sequence[Run], charts: Charts) -> Section:
    """Ranks and groups of each run."""
    blocks: list[Block] = []
    for run in runs:
        blocks += _of_run(run, "" if len(runs) == 1 else f"{run.name}: ")
    return Section("layout", "Layout", blocks)


def _of_run(run: Run, before: str) -> list[Block]:
    start = run.start
    ranks = start.get("ranks")
    if not isinstance(ranks, int):
        return [missing(f"{before}No layout was recorded.", "Runs of this version record it in events.jsonl.")]
    sizes = start.get("layout") or {}
    axes = [f"{axis} {size}" for axis, size in sizes.items()]
    blocks: list[Block] = [Words([f"{before}{count(ranks, 'rank')}{': ' + several(axes) if axes else ''}."])]
    blocks.append(Facts(_machine(start)))
    plan = _plan(run.spec.get("parallel"), ranks)
    if plan is not None and ranks > 1:
        blocks += _groups(plan)
    return blocks


def _machine(start: Record) -> list[tuple[str, str]]:
    machine = start.get("machine") or {}
    versions = start.get("versions") or {}
    facts = [("Machine", ", ".join(f"{_words(key)} {_words(value)}" for key, value in machine.items()))]
    facts.append(("Versions", ", ".join(f"{_words(key)} {_words(value)}" for key, value in versions.items())))
    return [(term, said) for term, said in facts if said]


def _words(value: Any) -> str:
    """A value as text; those of a mapping or list in a row."""
    if isinstance(value, dict):
        return " ".join(f"{key} {_words(item)}" for key, item in value.items())
    return " ".join(map(_words, value)) if isinstance(value, list) else str(value)


def _plan(options: Any, ranks: int) -> MeshPlan | None:
    """Plan of the built-in layout; None for one of another plugin, whose arithmetic a report does not know."""
    if not isinstance(options, dict) or options.get("use") != "folded":
        return None
    with suppress(MoefwError, TypeError, ValueError):
        meshes = {name: {**(options.get(name) or {})} for name in ("dense", "experts")}
        for mesh in meshes.values():
            mesh |= {"order": tuple(mesh["order"])} if "order" in mesh else {}
        folded = Folded(
            pp=options.get("pp", 1), dense=DenseMesh(**meshes["dense"]), experts=ExpertMesh(**meshes["experts"])
        )
        return folded.plan(ranks)
    return None


def _groups(plan: MeshPlan) -> list[Block]:
    """Groups of each axis, and the position of each rank."""
    used = [axis for axis in dict.fromkeys((*DENSE, *EXPERT)) if plan.sizes[axis] > 1]
    rows = []
    for axis in used:
        groups = dict.fromkeys(plan.group(rank, (axis,)) for rank in range(plan.world))
        told = [" ".join(map(str, group)) for group in list(groups)[:MOST_RANKS]]
        rows.append([AXES[axis], str(len(groups)), " | ".join(told)])
    positions = [
        [str(rank), *(str(plan.coordinates(rank)[axis]) for axis in used)]
        for rank in range(min(plan.world, MOST_RANKS))
    ]
    return [
        Table(title="Groups", head=["axis", "groups", "ranks of each"], rows=rows, texts=(0, 2)),
        Table(title="Position of each rank", head=["rank", *used], rows=positions, texts=(), visible=16),
    ]
