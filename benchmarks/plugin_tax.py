"""Cost of modularity: an MoE layer built from a spec against the same operations written inline.

Same process, weights and tokens, T=64, one thread, forward and backward. A measurement is several passes in a row, as
in a model of several layers. The ways alternate in an order that changes every round. The tax is the median over
rounds of the difference in CPU time. It is measured with tiny experts, where the noise of the GEMMs does not hide it,
and compared with the time of the layer at a usual size. An A/A control (inline against itself) shows the uncertainty.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

import record
from moefw.core.stages import Batch
from moefw.plugins.gemm.grouped.experts import _In, _Out
from moefw.runtime.compute.casts import FP32Recipe
from moefw.testing.layer_case import LayerCase, build_layer
from moefw_kernels.permute import gather, gather_sum, sort_slots
from moefw_kernels.routing import chosen

TOKENS = 64
EXPERTS = 16
TOP_K = 4
TINY = (16, 16)
USUAL = (512, 256)
"""Model dim and expert dim."""
RECIPE = FP32Recipe()
LAYERS = 8
WARM_UP = 5
"""Passes in a row, as in a model with that number of layers, and rounds that are not counted."""
ALLOWED_US = 16.0
ALLOWED_SHARE = 0.002
"""Half of what it was on a quiet machine when first measured, and a share of a layer of the usual size."""


def main() -> None:
    """Measure, print and write ``results/plugin_tax.json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=400)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    tiny = race(*TINY, rounds)
    usual = race(*USUAL, rounds // 4)
    tax_us = median(b - i for b, i in zip(tiny["built"], tiny["inline"], strict=True)) * 1e6
    control_us = median(a - i for a, i in zip(tiny["inline again"], tiny["inline"], strict=True)) * 1e6
    layer_us = median(usual["inline"]) * 1e6
    measured = {
        "shape": {"tokens": TOKENS, "experts": EXPERTS, "top_k": TOP_K, "tiny": TINY, "usual": USUAL, "dtype": "fp32"},
        "rounds": rounds,
        "tax_us": round(tax_us, 1),
        "control_us": round(control_us, 1),
        "usual_layer_us": round(layer_us, 1),
        "share_of_usual_layer": round(tax_us / layer_us, 4),
        "allowed": {"us": ALLOWED_US, "share": ALLOWED_SHARE},
    }
    print(f"plugin tax {tax_us:+.1f} us (control {control_us:+.1f} us; allowed {ALLOWED_US:.0f} us)")
    share = f"{tax_us / layer_us:+.2%} of the {layer_us:,.0f} us"
    print(f"{share} of a layer with D, F = {USUAL} (allowed {ALLOWED_SHARE:.1%})")
    print(record.write("plugin_tax", measured))


def race(dim: int, expert_dim: int, rounds: int) -> dict[str, list[float]]:
    """Return the CPU seconds of each round, for each way."""
    routing = {"use": "topk", "score": "sigmoid"}
    layer_case = LayerCase(
        tokens=(TOKENS,), dim=dim, expert_dim=expert_dim, num_experts=EXPERTS, top_k=TOP_K, parts={"routing": routing}
    )
    layer, shared = build_layer(layer_case)
    x_TD, probe_TD = layer_case.draw(0)
    x_TD.requires_grad_()
    ids = torch.zeros(1, TOKENS, dtype=torch.int64)
    batch = Batch(ids_BS=ids, labels_BS=ids)
    leaves = [x_TD, layer.router.weight, layer.experts.gate_up, layer.experts.down]

    def built() -> Tensor:
        return layer(x_TD, batch)[0]

    inline = Inline(*leaves[1:])

    def written() -> Tensor:
        out_TD: Tensor = inline(x_TD)
        return out_TD

    assert torch.equal(built(), written()), "both ways compute the same bits"
    ways: dict[str, Callable[[], Tensor]] = {"built": built, "inline": written, "inline again": written}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    order = random.Random(0)
    for turn in range(rounds + WARM_UP):
        for name in order.sample(list(ways), len(ways)):
            for leaf in leaves:
                leaf.grad = None
            began = time.process_time()
            for _ in range(LAYERS):
                (ways[name]() * probe_TD).sum().backward()
            if turn >= WARM_UP:
                seconds[name].append((time.process_time() - began) / LAYERS)
    shared.close()
    return seconds


class Inline(nn.Module):
    """The layer's computation written by hand: one module, no parts."""

    def __init__(self, router: nn.Parameter, gate_up: nn.Parameter, down: nn.Parameter) -> None:
        super().__init__()
        self.router = router
        self.gate_up = gate_up
        self.down = down

    def forward(self, x_TD: Tensor) -> Tensor:
        """Return the output of the layer."""
        logits_TE = linear(x_TD.float(), self.router.float())
        ids_TK = logits_TE.detach().sigmoid().topk(TOP_K).indices
        weights_TK = chosen(logits_TE, ids_TK).sigmoid()
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
        flat = ids_TK.flatten()
        torch.zeros(EXPERTS).scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.float32))
        slots = sort_slots(ids_TK, EXPERTS, num_rows=ids_TK.numel())
        weights_R = weights_TK.flatten().index_select(0, slots.slot_R)
        about = (slots.counts.cumsum(0, dtype=torch.int32), None, None)
        no_adapter = (None, None, None)
        h_RH = _In.apply(self.gate_up, *no_adapter, RECIPE, gather(x_TD, slots.rows), *about)
        rows_RD = _Out.apply(self.down, *no_adapter, RECIPE, None, h_RH, weights_R, *about)
        return gather_sum(rows_RD, slots.rows)


if __name__ == "__main__":
    main()
