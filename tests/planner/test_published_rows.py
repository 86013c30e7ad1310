"""What rows of the published table say of their step beside its layout."""

from __future__ import annotations

from collections import Counter

import pytest
from attrs import evolve

from moefw.runtime.pipeline.timeline import timeline
from published_rows import Predictor, Row, read

ROWS = {row["id"]: row for row in read()}


def passes(row: Row) -> list[Counter[tuple[str, int, int]]]:
    """Passes of each position in a step, by kind, stage and micro-batch."""
    order = row.order(row.micro_batches)
    return [
        Counter((one.kind, one.stage, one.micro_batch) for entry in entries for one in entry.passes)
        for entries in order
    ]


@pytest.mark.parametrize(("name", "schedules"), [("p140", 4), ("p141", 1), ("p142", 2), ("p018", 1)])
def test_gradients_are_accumulated_over_schedules_that_each_fill_and_empty(name: str, schedules: int) -> None:
    row = ROWS[name]
    in_one = evolve(row, fields={**row.fields, "notes": row["notes"].replace("GA", "")})
    assert (row.accumulation_steps, in_one.accumulation_steps) == (schedules, 1)
    assert passes(row) == passes(in_one)
    one, several = (timeline(each.order(each.micro_batches), lambda _: 1) for each in (in_one, row))
    ends = [max(entries[-1][1] for entries in played) for played in (one, several)]
    # A schedule more fills and empties once more: each position idles while the others run one pass forward and back.
    idle = 2 * (row.layout.pp - 1) * (schedules - 1)
    assert ends[1] - ends[0] == idle
    steady = Predictor.empty().steady(row)
    assert steady.end(lambda key: len(key[1]), lambda key: 0.0) == pytest.approx(ends[1])


def test_a_step_that_does_not_divide_into_its_schedules_is_one() -> None:
    row = ROWS["p140"]
    assert evolve(row, fields={**row.fields, "notes": "GA 7"}).accumulation_steps == 1


def test_overlap_with_pp_has_at_least_two_stages_a_rank_and_pairs() -> None:
    row = ROWS["p018"]
    without_chunks = evolve(row, fields={**row.fields, "vpp": ""})
    assert without_chunks.layout.chunks == 2
    order = without_chunks.order(without_chunks.micro_batches)
    assert any(len(entry.passes) > 1 for entry in order[0])


def test_without_pp_overlap_pairs_all_but_the_first_and_the_last_pass() -> None:
    (entries,) = ROWS["p006"].order(ROWS["p006"].micro_batches)
    assert [len(entry.passes) for entry in entries] == [1, *[2] * (ROWS["p006"].micro_batches - 1), 1]
