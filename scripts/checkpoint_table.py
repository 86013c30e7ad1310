"""Lets unlike layouts read each other's checkpoints, and writes a table. `make test-checkpoints` runs it."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import torch
from layout_table import ROOT, commit

from layout_runs import LOSS
from moefw.testing.pool import RankPool
from resume_pairs import LAYOUTS, PAIRS, STEP, Pairs

PAGE = ROOT / "docs" / "checkpoints.md"
HEADING = "## Layouts that read each other\n"
TEXT = f"""
A model with a layer for a second token, tied embeddings and biases of experts trained {STEP} steps in fp32 under the
layout of a row and saved a checkpoint. Ranks of the layout of a column loaded it and saved it again: all tensors had
the same bits. A number is the largest relative difference of the next {STEP} losses from those without the change, at
most {LOSS:g}. The last column is what the busiest rank wrote, over its share of the bytes: at most 1.1.
`make test-checkpoints` writes this table.
"""


def main() -> int:
    """Measure all pairs, write the table, and return 0 if all are alike."""
    measured, pool = commit(), RankPool(4)
    with tempfile.TemporaryDirectory() as folder:
        pairs = Pairs(pool, Path(folder))
        found: dict[tuple[str, str], tuple[list[str], float]] = {}
        for source, target in PAIRS:
            differing, loss = found[source, target] = pairs.deviation(source, target)
            print(f"{source} -> {target}: {loss:.1e}, {len(differing)} tensors differ", flush=True)
        busiest = {name: pairs.busiest(name) for name in LAYOUTS}
    pool.close()
    before, _, _ = PAGE.read_text().partition(HEADING)
    PAGE.write_text(before + HEADING + TEXT + table(found, busiest, measured))
    print(f"wrote {PAGE.relative_to(ROOT)}")
    alike = all(not differing and loss <= LOSS for differing, loss in found.values())
    return 0 if alike and max(busiest.values()) <= 1.1 else 1


def table(found: Mapping[tuple[str, str], tuple[list[str], float]], busiest: Mapping[str, float], measured: str) -> str:
    """Return the table, measured at a commit, as Markdown."""
    lines = ["", f"Measured {datetime.now(UTC):%Y-%m-%d}, commit {measured}, torch {torch.__version__}.", ""]
    lines.append(f"| written by | ranks | {' | '.join(LAYOUTS)} | busiest |")
    lines.append("|---" * (len(LAYOUTS) + 3) + "|")
    for source, (ranks, _) in LAYOUTS.items():
        cells = [cell(found.get((source, target))) for target in LAYOUTS]
        lines.append(f"| {source} | {ranks} | {' | '.join(cells)} | {busiest[source]:.3f} |")
    return "\n".join(lines) + "\n"


def cell(deviation: tuple[list[str], float] | None) -> str:
    """Return what the table says about a pair; nothing about a layout and itself."""
    if deviation is None:
        return ""
    differing, loss = deviation
    if differing:
        return f"**{len(differing)} tensors differ**"
    return f"{loss:.1e}" if loss <= LOSS else f"**{loss:.1e}**"


if __name__ == "__main__":
    sys.exit(main())
