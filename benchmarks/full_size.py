"""Plans of published rows at full size, as Megatron runs them, beside the published figures and the closed forms.

``moefw plan --as megatron`` measures the layers of a spec; :mod:`closed_form` writes them down, so that numbers can be
fitted to many rows. Both have to give a row the same time, and plans must not be further from what was published. It
prints a table and writes ``results/full_size.json``, for which all rows take about ten processor minutes.
``--rows p144`` does some rows alone, and writes nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from attrs import asdict, evolve, frozen

import goal
import record
from moefw.compose.assembly import Assembly
from moefw.compose.defaults import defaults
from moefw.compose.resolve import assemble_tree
from moefw.compose.spec.source import Marks
from moefw.core.site import Machine
from moefw.planner import ledger
from moefw.planner.time.forecast import forecast
from moefw.planner.time.scale import fitted
from moefw.planner.time.step import step_time
from published_rows import Predictor, Row, read
from published_specs import spec_of
from step_times import PLANS_APART, Errors, Summary, votes


def assembled(row: Row) -> Assembly:
    """Assembly of the spec of a row."""
    tree = {**spec_of(row), "run": {"device": "cpu"}}
    machine = Machine(device="cpu")
    return assemble_tree(tree, Marks("spec"), defaults=defaults(), world=row.layout.gpus, machine=machine)


@frozen
class Compared:
    """Seconds of a row's step, and of its categories: planned, and in closed form."""

    row: Row
    planned_s: float
    closed_s: float
    categories: Mapping[str, tuple[float, float]]

    @classmethod
    def of(cls, row: Row) -> Compared:
        """Comparison of a row, whose layers are measured. Both have the fitted factor of the row's software."""
        assembly = assembled(row)
        found = forecast(assembly, ledger(assembly), row.cluster, row["system"].lower(), row.software)
        predictor = Predictor.empty()
        work = found.work
        if row.accumulation_steps > 1:  # a step of a spec has one
            work = evolve(work, steady=predictor.steady(row))
        planned = step_time(work, found.scale, row.factor(fitted()))
        closed = predictor.step_time(row, fitted())
        names = dict.fromkeys([*closed.categories, *planned.categories])
        return cls(
            row,
            planned.step_s,
            closed.step_s,
            {name: (planned.categories.get(name, 0.0), closed.categories.get(name, 0.0)) for name in names},
        )

    @property
    def apart(self) -> float:
        """Difference of both, as a share of the closed form's."""
        return self.planned_s / self.closed_s - 1

    def errors(self, row: Row) -> tuple[float, float]:
        """Errors of the tokens a second of a row with this time: of the plan, and of the closed form."""
        planned, closed = (row.tokens / seconds / row.number("gpus") for seconds in (self.planned_s, self.closed_s))
        return planned / row.tokens_per_s - 1, closed / row.tokens_per_s - 1

    def __str__(self) -> str:
        """Line of a table."""
        row = self.row
        planned, closed = self.errors(row)
        where = f"{row['id']}  {row['model_printed']}, {row['gpus']} {row['system']}, {row['precision']}"
        return f"{where:50} apart {100 * self.apart:+.2f} %  errors {100 * planned:+.1f} {100 * closed:+.1f} %"

    def to_data(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "model": self.row["model_printed"],
            "gpus": f"{self.row['gpus']} {self.row['system']}",
            "planned_s": self.planned_s,
            "closed_form_s": self.closed_s,
            "apart": self.apart,
            "seconds": {name: list(both) for name, both in self.categories.items()},
        }


def alike(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Yield the rows that have one prediction."""
    predictor = Predictor.empty()
    groups: dict[object, list[Row]] = {}
    for row in rows:
        groups.setdefault(predictor.same(row), []).append(row)
    yield from groups.values()


def main() -> None:
    """Compare and print; write ``full_size.json`` of all rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", nargs="+", metavar="ID")
    asked = parser.parse_args().rows
    scored = [row for row in read() if row.is_scored]
    compared: dict[str, Compared] = {}
    planned: dict[str, float] = {}
    closed: dict[str, float] = {}
    for group in alike(scored):
        first = group[0]
        if asked and not set(asked) & {row["id"] for row in group}:
            continue
        each = compared[first["id"]] = Compared.of(first)
        print(each, flush=True)
        for row in group:
            planned[row["id"]], closed[row["id"]] = each.errors(row)
    if not asked:
        print(record.write("full_size", _data(scored, compared, planned, closed)))


def _data(rows: list[Row], compared: Mapping[str, Compared], planned: Errors, closed: Errors) -> dict[str, Any]:
    """Plain data of all rows. Prints the goals."""
    goals = [
        goal.at_most(f"{name}, {each.row['model_printed']}: plan over closed form, apart", abs(each.apart), PLANS_APART)
        for name, each in compared.items()
    ]
    print(goal.table(goals))
    errors = {name: Summary.of(votes(rows, found)) for name, found in (("plans", planned), ("closed forms", closed))}
    for name, summary in errors.items():
        print(f"{name}: mean, median, 90 % within, worst, within 20 %: {summary}")
    return {
        "errors": {name: asdict(each) for name, each in errors.items()},
        "rows": {name: each.to_data() for name, each in compared.items()},
        "goals": goals,
    }


if __name__ == "__main__":
    main()
