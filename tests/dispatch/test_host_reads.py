"""How often the host waits for the device between the router and combine, in a layer and micro-batch."""

from __future__ import annotations

import unittest.mock
from typing import Any

import pytest
import torch

from dispatchers import DISPATCHERS
from moefw.testing.host_waits import available
from moefw.testing.layer_case import LayerCase, solve
from moefw.testing.layer_waits import layer_waits
from moefw.testing.pool import RankPool
from pairwise import each_value

pytestmark = pytest.mark.skipif(not available(), reason="this torch has no devices that are written in Python")

BUDGET = {"rank_capacity": 8.0, "on_overflow": "rerun"}
CHOICES: dict[str, dict[str, Any]] = {
    **DISPATCHERS,
    "hybridep with a budget": {**DISPATCHERS["hybridep"], **BUDGET},
    "hybridep, max_tokens": {**DISPATCHERS["hybridep"], **BUDGET, "max_tokens": 7},
    "alltoall with a budget": {**DISPATCHERS["alltoall"], **BUDGET},
    "alltoall, max_tokens": {**DISPATCHERS["alltoall"], **BUDGET, "max_tokens": 7},
}
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "loop": {"gemm": {"use": "loop"}},
    "padding": {"masked": True},
    "aligned": {"row_alignment": 8},
    "dropped": {"routing": {"use": "topk", "capacity": {"factor": 1.0}}},
    "capacity": {"routing": {"use": "topk", "capacity": {"factor": 1.0, "pad": True}}, "row_alignment": 8},
}
"""Nothing is dropped or padded; experts need counts on the host; some tokens are padding; groups are padded; choices
are dropped; groups are padded to a capacity."""
RANKS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "alone": ((7,), {}),
    "ep 2": ((7, 5), {"experts": {"ep": 2}}),
    "two nodes": ((7, 5), {"experts": {"ep": 2}, "ranks_per_node": 1}),
    "etp 2": ((7, 5), {"experts": {"etp": 2}}),
}
ALONE = {
    #                          plain  loop  padding  aligned  dropped  capacity
    "allgather":              (0,     1,    0,       1,       0,       0),
    "alltoall":               (0,     1,    0,       1,       0,       0),
    "deepep":                 (0,     1,    0,       1,       0,       0),
    "hybridep":               (0,     1,    0,       1,       0,       0),
    "hybridep with a budget": (0,     1,    0,       0,       0),
    "hybridep, max_tokens":   (0,     1,    0,       0,       0),
    "alltoall with a budget": (0,     1,    0,       0,       0),
    "alltoall, max_tokens":   (0,     1,    0,       0,       0),
}  # fmt: skip
"""Reads of a rank that is alone: what a part or a shape asks for. A budget is refused with a capacity that pads."""
TOGETHER = {
    name: (0, 1, 0, 0, 0) if name.endswith("max_tokens") else (1,) * len(reads) for name, reads in ALONE.items()
}
"""Reads of one of several ranks: the sizes of what they send each other, and with them all that is asked for."""


def case_of(dispatch: str, ranks: str, layer: str) -> LayerCase:
    tokens, parallel = RANKS[ranks]
    settings = dict(LAYERS[layer])
    parts = {"gemm": {"use": "grouped"}, "precision": {"use": "bf16"}}
    parts |= {name: settings.pop(name) for name in ("gemm", "routing") if name in settings}
    parts |= {"dispatch": CHOICES[dispatch], "parallel": parallel}
    return LayerCase(tokens=tokens, dim=16, parts=parts, shared=True, **settings)


def waited(dispatch: str, ranks: str, layers: list[str]) -> list[tuple[list[str], list[str], list[str]]]:
    """Return the reads, the uploads and the waits of backward of each layer; outputs are those of a CPU."""
    found = []
    for layer in layers:
        case = case_of(dispatch, ranks, layer)
        waits = layer_waits(case)
        torch.testing.assert_close(waits.out_TD, solve(case).out_TD, rtol=0.02, atol=0.02)
        found.append(tuple([str(wait) for wait in some] for some in (waits.reads, waits.uploads, waits.backward)))
    return found


@pytest.mark.parametrize(("dispatch", "name"), each_value(CHOICES, RANKS))
def test_the_host_reads_what_it_must_once_and_uploads_nothing(own_pool: RankPool, dispatch: str, name: str) -> None:
    wanted = (ALONE if name == "alone" else TOGETHER)[dispatch]
    layers = [*LAYERS][: len(wanted)]
    for found in own_pool.run(waited, len(RANKS[name][0]), dispatch, name, layers):
        for (reads, uploads, backward), layer, count in zip(found, layers, wanted, strict=True):
            assert len(reads) == count, (layer, reads)
            assert uploads == backward == [], layer


def reads_of(tokens: int, row_alignment: int) -> int:
    """Return the reads of a layer of four experts, two for each token, on one rank."""
    parts = {"gemm": {"use": "grouped"}, "precision": {"use": "bf16"}}
    case = LayerCase(tokens=(tokens,), dim=16, parts=parts, row_alignment=row_alignment)
    waits = layer_waits(case)
    torch.testing.assert_close(waits.out_TD, solve(case).out_TD, rtol=0.02, atol=0.02)
    return len(waits.reads)


def test_groups_are_padded_without_a_read_where_padding_is_at_most_a_sixteenth(own_pool: RankPool) -> None:
    """Four groups aligned to 8 have at most 28 rows of padding: a sixteenth of the choices of 224 tokens."""
    assert [own_pool.run(reads_of, 1, tokens, 8)[0] for tokens in (223, 224)] == [1, 0]


ROUTERS: dict[str, dict[str, Any]] = {
    "forced": {"use": "forced"},
    "bias": {"use": "topk", "score": "sigmoid", "balance": [{"kind": "expert_bias", "rate": 0.01}]},
    "losses": {"use": "topk", "balance": [{"kind": "aux_loss", "coeff": 0.01}, {"kind": "z_loss", "coeff": 0.01}]},
    "quantile": {"use": "topk", "balance": [{"kind": "quantile", "ema": 0.9}], "jitter": 0.01},
    "groups": {"use": "topk", "score": "sigmoid", "groups": {"count": 2, "keep": 1}},
}


def routed() -> list[list[str]]:
    """Return the waits of a layer on one rank, for each router."""
    cases = [
        LayerCase(tokens=(7,), dim=16, parts={"routing": one, "precision": {"use": "bf16"}}) for one in ROUTERS.values()
    ]
    found = [layer_waits(case) for case in cases]
    return [[str(wait) for wait in (*one.reads, *one.uploads, *one.backward)] for one in found]


def sinkhorn() -> list[str]:
    """Return the reads of a layer on one rank, whose router takes all of its rounds."""
    parts = {"routing": {"use": "sinkhorn", "max_rounds": 20}, "precision": {"use": "bf16"}}
    with unittest.mock.patch("moefw.plugins.routers.sinkhorn.router.SETTLED", -1.0):
        return [str(wait) for wait in layer_waits(LayerCase(tokens=(7,), dim=16, parts=parts)).reads]


def test_sinkhorn_reads_once_in_eight_rounds(own_pool: RankPool) -> None:
    assert len(own_pool.run(sinkhorn, 1)[0]) == 2


def test_a_router_makes_nobody_wait(own_pool: RankPool) -> None:
    assert dict(zip(ROUTERS, own_pool.run(routed, 1)[0], strict=True)) == {name: [] for name in ROUTERS}
