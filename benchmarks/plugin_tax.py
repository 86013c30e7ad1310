"""What modularity costs: an MoE layer built from a spec against the same operations written inline.

Same process, same weights and tokens, T=64, forward and backward, rounds interleaved. Prints the least CPU time of
each, the ratio, and an A/A control (the inline layer against itself): a tax within the control's spread is none.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable

import record
import torch
from torch import Tensor
from torch.nn.functional import linear

from moefw.core.stages import Batch
from moefw.plugins.gemm.grouped.experts import _Experts
from moefw.testing.trial import Trial, build_layer
from moefw_kernels.permute import gather, gather_sum, group_chunks, sort_slots

TOKENS, DIM, EXPERT_DIM, EXPERTS, TOP_K = 64, 512, 256, 16, 4


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=400)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    routing = {"use": "topk", "score": "sigmoid"}
    trial = Trial(
        tokens=(TOKENS,), dim=DIM, expert_dim=EXPERT_DIM, num_experts=EXPERTS, top_k=TOP_K, parts={"routing": routing}
    )
    layer, shared = build_layer(trial)
    x_TD, probe_TD = trial.draw(0)
    x_TD.requires_grad_()
    ids = torch.zeros(1, TOKENS, dtype=torch.int64)
    batch = Batch(ids_BS=ids, labels_BS=ids)
    router, gate_up, down = layer.router.weight, layer.experts.gate_up, layer.experts.down

    def built() -> Tensor:
        return layer(x_TD, batch)[0]

    def inline() -> Tensor:
        logits_TE = linear(x_TD.float(), router.float())
        scores_TE = logits_TE.sigmoid()
        ids_TK = scores_TE.topk(TOP_K).indices
        weights_TK = scores_TE.gather(1, ids_TK)
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20) * 1.0
        flat = ids_TK.flatten() + 1
        torch.zeros(EXPERTS + 1).scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.float32))[1:]
        slots = sort_slots(ids_TK, EXPERTS)
        groups = group_chunks([slots.counts.tolist()], 1, x_TD.device)
        rows_RD = gather(x_TD, slots.rows)
        weights_R = weights_TK.flatten().index_select(0, slots.slot_R)
        rows_RD = _Experts.apply(rows_RD, weights_R, groups.offsets_e, gate_up, down)
        return gather_sum(rows_RD, slots.rows)

    assert torch.equal(built(), inline()), "both ways compute the same bits"
    leaves = [x_TD, *layer.parameters()]
    best = race({"built": built, "inline": inline, "inline again": inline}, probe_TD, leaves, rounds)
    shared.close()
    tax = best["built"] - best["inline"]
    sizes = f"T={TOKENS} D={DIM} F={EXPERT_DIM} E={EXPERTS} K={TOP_K} fp32"
    print(f"{sizes}, one thread, least of {rounds} rounds, forward+backward")
    for name, seconds in best.items():
        print(f"  {name:13s} {seconds * 1e6:9.1f} us   {seconds / best['inline']:.4f}x inline")
    measured = {"shape": sizes, "rounds": rounds, "least_us": {k: round(v * 1e6, 1) for k, v in best.items()}}
    print(record.write("plugin_tax", measured))
    print(f"plugin tax: {tax * 1e6:+.1f} us, {tax / best['inline']:+.2%} (allowed: 15 us and 2%)")


def race(
    ways: dict[str, Callable[[], Tensor]], probe_TD: Tensor, leaves: list[Tensor], rounds: int
) -> dict[str, float]:
    """Return the least seconds of each way; they take turns, in an order that changes every round."""
    best = dict.fromkeys(ways, float("inf"))
    order = random.Random(0)
    for turn in range(rounds + 20):
        for name, way in order.sample(list(ways.items()), len(ways)):
            for leaf in leaves:
                leaf.grad = None
            began = time.process_time()
            (way() * probe_TD).sum().backward()
            if turn >= 20:
                best[name] = min(best[name], time.process_time() - began)
    return best


if __name__ == "__main__":
    main()
