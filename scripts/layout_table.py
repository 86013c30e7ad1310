"""Trains under every layout of tests/layouts.yaml and writes docs/layouts.md. `make test-layouts` runs it."""

from __future__ import annotations

import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import torch

from layout_runs import LOSS, NORM, STEPS, WEIGHTS, Deviation, LayoutTable, Row
from moefw.testing.pool import RankPool

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "layouts.md"
HEAD = f"""# Layouts that train alike

Every row trained {STEPS} steps in fp32 on gloo ranks and was held against one rank: weights the same bits at the start,
losses of every step within {LOSS:g} and gradient norms within {NORM:g} of it, weights at the end within {WEIGHTS:g}
(absolute). `padded`: ranks hold unequal numbers of valid tokens, some none. The rows are `tests/layouts.yaml`;
`make test-layouts` writes this page.
"""


def main() -> int:
    """Train, write the page, and return 0 if every layout trains like one rank."""
    measured, pool = commit(), RankPool(16)
    table = LayoutTable(ROOT / "tests" / "layouts.yaml", pool)
    found = []
    for row in table.rows:
        began = time.monotonic()
        found.append((row, table.deviation(row)))
        verdict = "alike" if found[-1][1].alike else "NOT ALIKE"
        print(f"{verdict:9} {row} ({time.monotonic() - began:.0f} s) {found[-1][1]}", flush=True)
    pool.close()
    PAGE.write_text(page(found, measured))
    print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0 if all(deviation.alike for _, deviation in found) else 1


def page(found: list[tuple[Row, Deviation]], measured: str) -> str:
    """Return the table, measured at a commit, as Markdown."""
    lines = [HEAD, f"Measured {datetime.now(UTC):%Y-%m-%d}, commit {measured}, torch {torch.__version__}.", ""]
    lines += [
        "| ranks | parallel | model | dispatch | cp | pipeline | loss | gradient norm | weights | |",
        "|---" * 10 + "|",
    ]
    for row, deviation in found:
        parallel = str(row).split(" ", 2)[2].rsplit("}", 1)[0] + "}"
        data = row.model + (", padded" if row.padded else "")
        over = row.context_parallel if row.shares_sequences else ""
        stages = f"`{row.schedule}`" if row.has_stages else ""
        figures = f"{deviation.loss:.1e} | {deviation.norm:.1e} | {deviation.weights:.1e}"
        verdict = "alike" if deviation.alike else "**not alike**"
        lines.append(
            f"| {row.ranks} | `{parallel}` | {data} | {row.dispatch} | {over} | {stages} | {figures} | {verdict} |"
        )
    return "\n".join(lines) + "\n"


def commit() -> str:
    """Return the current commit."""
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
