"""How many kernels a layer launches on a GPU, and how many bytes those move that are no matrix products."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from launch_counts import BACKWARD, KERNELS, PRODUCTS, Launch, Launches
from moefw.core.stages import Batch
from moefw.runtime.compute.weights import shared_by_micro_batches
from moefw.testing.host_waits import HostWaits, available
from moefw.testing.layer_case import LayerCase, build_layer
from moefw.testing.pool import RankPool
from moefw_kernels.expert_gemm import UNTUNED
from moefw_kernels.routing import Gating, Segments
from triton_compiled import count_launches
from triton_on_cpu import TritonOnCpu

TOKENS, DIM, EXPERT_DIM, TOP_K = 256, 512, 192, 8
PARTS = {"dispatch": {"use": "alltoall"}, "gemm": {"use": "grouped"}, "precision": {"use": "bf16"}}
AUX, Z, BIAS = {"kind": "aux_loss", "coeff": 0.01}, {"kind": "z_loss", "coeff": 0.01}, {"kind": "expert_bias"}
ROUTERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "groups and a bias": {
        "score": "sigmoid",
        "groups": {"count": 4, "keep": 2},
        "balance": [{"kind": "expert_bias", "rate": 0.01}],
    },
    "losses": {"balance": [AUX, Z]},
    "losses of tokens under a mask": {"pre_softmax": True, "balance": [AUX, Z]},
    "a loss over sequences": {"balance": [{**AUX, "over": "sequence"}]},
    "a loss over documents": {"balance": [{**AUX, "over": "sequence"}]},
    "DeepSeek-V3": {
        "score": "sigmoid",
        "groups": {"count": 4, "keep": 2},
        "balance": [BIAS, {**AUX, "over": "sequence"}],
    },
    "a loss over global batches": {"score": "sqrtsoftplus", "balance": [{**AUX, "over": "global_batch"}, Z]},
}
MOST = {
    #                                 forward  backward
    "plain":                         (17, 30),
    "groups and a bias":             (17, 30),
    "losses":                        (22, 35),
    "losses of tokens under a mask": (28, 36),
    "a loss over sequences":         (21, 35),
    "a loss over documents":         (21, 35),
    "DeepSeek-V3":                   (21, 35),
    "a loss over global batches":    (24, 36),
}  # fmt: skip
"""Kernels of a layer, of which no more than 40 each way are allowed."""


@pytest.fixture(scope="module")
def rank() -> Iterator[RankPool]:
    """A rank of its own: the device stays registered in a process."""
    pool = RankPool(1)
    yield pool
    pool.close()


def documents(batch: Batch) -> Batch:
    """Return the batch as a pack of documents."""
    lengths = 100, TOKENS - 100
    documents_BS = torch.arange(2).repeat_interleave(torch.tensor(lengths)).unsqueeze(0)
    positions_BS = torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)
    seeds_B = torch.arange(2)
    return replace(batch, lengths=lengths, documents_BS=documents_BS, positions_BS=positions_BS, seeds_B=seeds_B)


def seen(router: str, gemm: str = "grouped") -> tuple[list[Launch], list[Launch]]:
    """Return the launches of forward and of backward in the second micro-batch of a step. The host reads nothing."""
    parts = {**PARTS, "gemm": {"use": gemm}, "routing": {"use": "topk", **ROUTERS[router]}}
    sizes = {"dim": DIM, "expert_dim": EXPERT_DIM, "num_experts": 16, "top_k": TOP_K}
    case = LayerCase(tokens=(TOKENS,), parts=parts, plugins=(TritonOnCpu,), masked="mask" in router, **sizes)
    layer, shared = build_layer(case)
    with HostWaits() as waits:
        waits.move(layer)
        x_TD, probe_TD = waits.on_device(case.draw(0))
        x_TD.requires_grad_()
        with shared_by_micro_batches(layer.parameters()):
            for _ in range(2):
                batch = waits.on_device(documents(case.batch(0)) if "documents" in router else case.batch(0))
                with Launches() as launches:
                    out_TD, _ = layer(x_TD, batch)
                    forward = len(launches.seen)
                    torch.autograd.backward([out_TD], [probe_TD])
        assert not waits.reads
    shared.close()
    return launches.seen[:forward], launches.seen[forward:]


def kernels(launches: list[Launch]) -> int:
    return sum(launch.kernels for launch in launches)


needs_a_device = pytest.mark.skipif(not available(), reason="this torch has no devices that are written in Python")


@needs_a_device
@pytest.mark.parametrize("router", ROUTERS)
def test_a_layer_launches_few_kernels(rank: RankPool, router: str) -> None:
    ((forward, backward),) = rank.run(seen, 1, router)
    assert {"_grouped_mm", "gather_sum", "counting_sort"} <= {launch.name for launch in forward}
    assert {"_grouped_mm", "gather_sum", "weighted_swiglu_backward"} <= {launch.name for launch in backward}
    counts = kernels(forward), kernels(backward)
    assert all(found <= most for found, most in zip(counts, MOST[router], strict=True)), (counts, forward, backward)


@needs_a_device
def test_forward_moves_little_more_than_it_must(rank: RankPool) -> None:
    """At least ``2 (Td + Sd) + 3Sn + Td`` numbers of bf16, for S = TK rows.

    A gather reads Td and writes Sd, SwiGLU reads 2Sn and writes Sn, combine reads Sd and writes Td, the router reads
    Td. All other operators count too, and all bytes that they read and write, except those of matrix products. No more
    than 1.8 times the least is allowed.
    """
    ((forward, _),) = rank.run(seen, 1, "plain")
    nbytes = sum(launch.nbytes for launch in forward if launch.name not in PRODUCTS)
    rows = TOKENS * TOP_K
    least = 2 * (2 * (TOKENS * DIM + rows * DIM) + 3 * rows * EXPERT_DIM + TOKENS * DIM)
    assert 0.9 < nbytes / least < 1.1


@needs_a_device
def test_the_gemm_triton_launches_fewer_kernels_and_moves_at_most_three_quarters_of_the_bytes(rank: RankPool) -> None:
    """Bytes of all operators but products. ``add_`` is one here: on a GPU, that of weight gradients is in the product."""
    ((forward, backward),) = rank.run(seen, 1, "plain", TritonOnCpu.name)
    ((forward_of_grouped, backward_of_grouped),) = rank.run(seen, 1, "plain")
    assert (kernels(forward), kernels(backward)) == (15, 28)
    for ours, theirs in ((forward, forward_of_grouped), (backward, backward_of_grouped)):
        assert kernels(ours) < kernels(theirs)
        nbytes, more = (
            sum(launch.nbytes for launch in launches if launch.name not in (*PRODUCTS, "add_"))
            for launches in (ours, theirs)
        )
        assert nbytes <= 0.75 * more


def none(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def launched(documents: bool) -> dict[tuple[str, str], int]:
    """Return what the functions of ``KERNELS`` and ``BACKWARD`` launch, on tensors without memory."""
    segments = Segments(1, none(8, dtype=torch.int64) if documents else None)
    h, weights, order = none(64, 32), none(64, dtype=torch.float32), none(64, dtype=torch.int32)
    logits, gating = none(8, 16, dtype=torch.float32), Gating(k=8)
    chosen = order.view(8, 8), weights.view(8, 8), None, weights.view(8, 8), gating, 16
    scalar, seen = none(dtype=torch.float32), none(1, 17, dtype=torch.float32)
    tile = UNTUNED.gated
    given: dict[tuple[str, str], tuple[Any, ...]] = {
        ("counting_sort", "counting_sort"): (none(64, dtype=torch.int64), 16),
        ("empty_groups", "clear_empty_groups"): (none(4, 8, 8), order[:4]),
        ("expert_gemm", "gated"): (h, none(4, 64, 32), None, weights, order[:4], order, None, tile),
        ("expert_gemm", "gated_backward"): (h, none(4, 32, 16), None, h, weights, order[:4], order, None, tile),
        ("expert_gemm", "product"): (h, none(4, 32, 16), None, None, order[:4], order, False, tile),
        ("expert_gemm", "row_tiles"): (order[:4], 64),
        ("permute", "gather_sum"): (h, order.view(8, 8)),
        ("permute", "tokens_and_rows"): (order, 64, 8),
        ("routing", "route"): (logits, gating, None, None),
        ("routing", "route_backward"): chosen,
        ("routing.balance", "switch_loss"): (seen[:, 1:], seen, 2.0),
        ("routing.balance", "switch_loss_backward"): (seen, scalar, 2.0),
        ("routing.balance", "token_sums"): (logits, gating, None, None, segments, 0.1),
        ("routing.balance", "token_sums_backward"): (logits, "softmax", None, segments, 0.1, seen[:, 1:], scalar),
        ("swiglu", "weighted_swiglu"): (h, weights),
        ("swiglu", "weighted_swiglu_backward"): (none(64, 16), h, weights),
    }
    found = {}
    for (package, name), args in given.items():
        function = getattr(import_module(f"moefw_kernels.{package}.triton"), name)
        found[package, name] = count_launches(lambda function=function, args=args: function(*args))
    return found


@pytest.mark.parametrize("documents", [False, True])
def test_the_kernels_of_a_function_are_those_that_it_launches(compiler: ProcessPoolExecutor, documents: bool) -> None:
    """A sum of PyTorch behind that of the router is one more."""
    found = compiler.submit(launched, documents).result()
    assert {key: found.pop((key[0], f"{key[1]}_backward")) for key in BACKWARD} == BACKWARD
    found["routing", "route"] += 1
    assert found == KERNELS
