"""The page of searches around published layouts: what counts as found, and what would refute a prediction."""

from __future__ import annotations

from typing import Any

import pytest

import tune
from published_rows import read
from published_specs import spec_of

ROWS = {row["id"]: row for row in read()}


def found(own_s: float, *, left: int = 1 << 30, beyond_s: float | None = None) -> dict[str, Any]:
    """A search in which the best takes 1 s, ratios are wrong by 6 %, and the published layout takes ``own_s``.

    ``beyond_s``: what the best takes that shards otherwise, if any does.
    """
    time = {"error_percent": 10.0, "model_tflops_per_gpu": 1700.0, "extrapolated": []}
    best = {"label": "pp 4", "step_time_s": 1.0, "left_bytes": 1 << 30, "added_seconds": {"experts": 0.5}, "time": time}
    own = {
        "step_time_s": own_s,
        "fits": left >= 0,
        "left_bytes": left,
        "added_seconds": {"experts": own_s - 0.5},
        "error_of_ratio_percent": 6.0,
        "below_tied_percent": max(0.0, 100 * (1 - 1.06 / own_s)),
    }
    beyond = None
    if beyond_s is not None:
        beyond = {"label": "zero 2", "step_time_s": beyond_s, "faster_percent": 100 * (own_s / beyond_s - 1)}
    return {
        "ok": True,
        "best": best,
        "own": own,
        "tied": [best],
        "reasons": ["pp: why"],
        "counts": {"candidates": 2},
        "cpu_s": 1.0,
        "parameters_bytes": 3 << 30,
        "beyond": beyond,
        "commit": "abc",
    }


@pytest.mark.parametrize(
    ("each", "verdict"),
    [
        (found(1.05), "found: tied"),
        (found(1.08), "found: 1.9 % below the tied group"),
        (found(1.25), "missed: 15.2 % below the tied group"),
        (found(1.0, left=-(2 << 30)), "missed: 2.0 GiB are missing; parameters, in fp32, take 3.0"),
        ({"ok": False, "problems": [{"what": "nothing fits.", "fix": None}]}, "missed: nothing fits"),
    ],
)
def test_a_published_layout_is_found_if_it_fits_and_is_nearly_tied(each: dict[str, Any], verdict: str) -> None:
    (row,) = [line for line in tune.page({"p018": each}, ROWS) if line.startswith("| p018")]
    assert row.endswith(f"| {verdict} |")


def test_a_prediction_says_what_refutes_it() -> None:
    said = "\n".join(tune.page({"p018": found(1.25)}, ROWS))
    assert "A gain is predicted: the best is 25.0 ± 6 % faster" in said
    assert "trains at 1936 to 2184 TFLOPS a GPU, or the prediction is refuted" in said
    assert "No gain is predicted" in "\n".join(tune.page({"p018": found(1.02)}, ROWS))


def test_other_sharding_is_named_if_it_is_faster_than_the_best_found() -> None:
    said = "\n".join(tune.page({"p018": found(1.1, beyond_s=0.8)}, ROWS))
    assert "of which no run was published: zero 2, which takes 0.80 s, 38 % faster than the published layout" in said
    assert "no run was published: zero" not in "\n".join(tune.page({"p018": found(1.1, beyond_s=1.05)}, ROWS))


def test_states_gradients_and_recompute_are_those_of_the_recipe() -> None:
    deepseek = spec_of(ROWS["p018"])
    assert deepseek["memory"] == [{"use": "optimizer-bf16"}]
    assert deepseek["train"]["main_gradients"] == "bfloat16"
    assert spec_of(ROWS["p142"])["train"]["main_gradients"] == "bfloat16"
    assert spec_of(ROWS["p109"])["train"]["main_gradients"] == "float32"
    recompute, states = spec_of(ROWS["p142"])["memory"]
    assert {"attention", "experts", "dispatch"} <= set(recompute["regions"])
    assert states == {"use": "optimizer-bf16"}
