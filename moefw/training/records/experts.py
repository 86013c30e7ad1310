"""Summary of the load of experts in a line of ``metrics.jsonl``, by layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from moefw.training.records.json_lines import Record

Floats = np.ndarray[Any, np.dtype[np.float64]]


def summary(load_LE: Floats, router_entropy_L: Sequence[float | None] = ()) -> dict[str, list[Any]]:
    """Lists by layer, of 4 significant digits: ``busiest``, ``idlest``, ``dead``, ``load_entropy``, ``router_entropy``.

    ``load_LE``: the share of tokens of each expert, 1.0 is fair. ``busiest`` and ``idlest`` are the largest and the
    smallest, ``dead`` is the number of experts without a token, ``load_entropy`` the entropy of the load over ln E, 0
    where there is no load. ``router_entropy_L`` is told as it is, and left out if no router tells any.
    """
    if not load_LE.size:
        return {}
    lists: dict[str, list[Any]] = {
        "busiest": _rounded(load_LE.max(-1)),
        "idlest": _rounded(load_LE.min(-1)),
        "dead": (load_LE == 0).sum(-1).tolist(),
        "load_entropy": _rounded(entropy_of_load(load_LE)),
    }
    if any(value is not None for value in router_entropy_L):
        lists["router_entropy"] = [None if value is None else _digits(value) for value in router_entropy_L]
    return lists


def entropy_of_load(load_LE: Floats) -> Floats:
    """Entropy of the load of each layer over ln E, from 0 to 1, which is even. Of one expert it is 1."""
    num_experts = load_LE.shape[-1]
    if num_experts == 1:
        return np.ones(len(load_LE))
    total_L = load_LE.sum(-1, keepdims=True)
    shares_LE = np.divide(load_LE, total_L, out=np.zeros_like(load_LE), where=total_L > 0)
    logs_LE = np.log(shares_LE, out=np.zeros_like(shares_LE), where=shares_LE > 0)  # 0 ln 0 is 0
    entropy_L: Floats = -(shares_LE * logs_LE).sum(-1) / np.log(num_experts)
    return entropy_L


def summary_in(record: Record) -> dict[str, list[Any]] | None:
    """Summary in a line of metrics, or derived from the whole load, which older runs wrote; None if there is neither.

    A run without MoE layers has none.
    """
    told: dict[str, list[Any]] | None = record.get("experts")
    load = record.get("expert_load")
    if told is not None or not load:
        return told or None
    return summary(np.array(load, dtype=np.float64))


def _rounded(values_L: Floats) -> list[float]:
    return [_digits(value) for value in values_L.tolist()]


def _digits(value: float) -> float:
    return float(f"{value:.4g}")
