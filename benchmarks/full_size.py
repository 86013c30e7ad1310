"""Plans of published rows at full size, as Megatron runs them, beside the closed forms to which numbers were fitted.

``moefw plan --as megatron`` measures the layers of a spec; :mod:`closed_form` writes them down. Both have to give a row
the same time. It prints a table and writes ``results/full_size.json``. ``--rows p144`` does some rows alone: those of
large models take minutes each.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, Final

from attrs import frozen

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
from published_rows import Predictor, Row, read
from tune import spec_of

ROWS: Final = ("p144", "p002", "p107")
"""A model each: on one stage, on merged stages, and on merged ones with a layer that predicts a token."""
GOAL: Final = 0.005


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
        """Comparison of a row, whose layers are measured."""
        assembly = assembled(row)
        planned = forecast(assembly, ledger(assembly), row.cluster, row["system"].lower(), row.software).told
        closed = Predictor.empty().told(row, fitted())
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


def main() -> None:
    """Compare, print and write ``full_size.json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", nargs="+", default=ROWS)
    asked = parser.parse_args().rows
    rows = {row["id"]: row for row in read()}
    compared = {name: Compared.of(rows[name]) for name in asked}
    goals = [
        goal.at_most(f"{name}, {each.row['model_printed']}: plan over closed form, apart", abs(each.apart), GOAL)
        for name, each in compared.items()
    ]
    print(goal.table(goals))
    data = {name: each.to_data() for name, each in compared.items()}
    print(record.write("full_size", {"rows": data, "goals": goals}))


if __name__ == "__main__":
    main()
