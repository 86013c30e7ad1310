"""The line of a step in ``metrics.jsonl``: docs/runs.md says what its fields are."""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np

from moefw.training.engine import StepResult
from moefw.training.records.experts import summary
from moefw.training.records.json_lines import Record


def record_of(step: int, lr: float, result: StepResult) -> Record:
    """Record of a step, counted from 0, whose field ``step`` counts from 1."""
    record: Record = {
        "step": step + 1,
        "time": round(time.time(), 3),
        "loss": result.loss,
        **result.aux_losses,
        "loss_shares": shares(result.loss, result.aux_losses),
        **result.counts,
        "grad_norm": result.grad_norm,
        "grad_norms": result.grad_norms,
        "lr": lr,
        "load_max_over_mean": result.load_max_over_mean,
    }
    if result.largest_logit is not None:
        record["largest_logit"] = result.largest_logit
    if result.layers:
        record["experts"] = summary(np.array(result.load_LE), result.router_entropy_L)
    return record


def shares(loss: float, terms: Mapping[str, float]) -> dict[str, float]:
    """Share of each term in the sum of the loss and all terms, of 4 significant digits."""
    total = loss + sum(terms.values())
    return {name: float(f"{value / total:.4g}") if total else 0.0 for name, value in terms.items()}
