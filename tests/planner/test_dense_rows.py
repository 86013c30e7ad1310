"""Rows of dense models, to which nothing was fitted: their operations are the published ones, and the page is true."""

from __future__ import annotations

from pathlib import Path

import pytest

import dense_rows
from moefw.planner.time.scale import fitted
from published_rows import Predictor
from step_times import Summary, errors, votes

PAGE = Path(__file__).parents[2] / "docs" / "time-dense.md"
COMMIT = "Predicted by the code of commit"


def test_operations_a_token_are_those_of_published_rows() -> None:
    rows = {row["model"]: row for row in dense_rows.read()}
    assert set(rows) == set(dense_rows.LLAMA)
    for row in rows.values():
        assert row.tokens_per_s == pytest.approx(float(row["tokens_per_s_per_gpu"]), rel=0.02), row["id"]


def test_rows_of_this_year_are_predicted_although_nothing_was_fitted_to_them() -> None:
    rows = [row for row in dense_rows.read() if row["stack"] == "mcore26"]
    assert Summary.of(votes(rows, errors(rows, Predictor.empty(), fitted()))).mean < 0.1


@pytest.mark.deep
def test_the_page_is_what_the_command_writes() -> None:
    def unlike_commits(page: str) -> list[str]:
        return [line for line in page.splitlines() if not line.startswith(COMMIT)]

    assert unlike_commits(PAGE.read_text()) == unlike_commits("\n".join(dense_rows.lines(dense_rows.read())))
