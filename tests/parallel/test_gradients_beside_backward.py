"""Gradients that FSDP does not shard are summed over ranks while the last backward goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from moefw.runtime.naming import canonical_parameters
from moefw.runtime.parallel.gradients import Gradients
from moefw.runtime.phases import Phase, first_uses
from moefw.runtime.pipeline.in_flight import InFlight
from moefw.testing.layer_case import LayerCase
from moefw.testing.pool import RankPool
from moefw.testing.suites.runs import global_batch, open_model, whole_model
from moefw.testing.suites.watch import same_bits, worst_error
from moefw.testing.training import SMALL
from moefw.training.engine import Engine
from pairwise import quick

SIZES = {"shared_expert_dim": 16, "vocab_size": 64, "num_layers": 4, "num_dense_layers": 1, "mtp_layers": 1}
MICRO_BATCHES = 3
IN_PLACE = mock.patch("moefw.runtime.parallel.gradients.SMALL", 100)
"""Gradients of more than 100 elements are not small: those of matrices here."""
TIED = {**SMALL["model"], **SIZES, "tie_embeddings": True}
WORLDS: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "2 ranks": (2, {}),
    "2 ranks, ep 2": (2, {"parallel": {"experts": {"ep": 2}}}),
    "2 ranks, tp 2": (2, {"parallel": {"dense": {"tp": 2}}}),
    "2 ranks, tied": (2, {"model": TIED}),
    "2 ranks, recompute": (2, {"memory": [{"use": "recompute", "regions": ["attention", "dispatch"]}]}),
    "2 ranks, merged": (2, {"pipeline": {"use": "merged"}, "parallel": {"experts": {"ep": 2}}}),
    "2 ranks, delayed": (2, {"train": {"delay_wgrads": True}, "parallel": {"experts": {"ep": 2}}}),
    "4 ranks, interleaved": (4, {"parallel": {"pp": 2}, "pipeline": {"use": "interleaved"}}),
    "4 ranks, zero-bubble": (4, {"parallel": {"pp": 2}, "pipeline": {"use": "zero-bubble"}}),
    "4 ranks, dualpipe-v, tied": (4, {"parallel": {"pp": 2}, "pipeline": {"use": "dualpipe-v"}, "model": TIED}),
}

QUICK = ("2 ranks", "2 ranks, ep 2", "2 ranks, tied", "2 ranks, merged", "4 ranks, dualpipe-v, tied")


def case_of(world: str) -> LayerCase:
    ranks, given = WORLDS[world]
    parts = {**given}
    parallel: Any = parts.get("parallel", {})
    case = whole_model(ranks, parts=parts, plugins=(), micro_batch=1, sizes=SIZES)
    copies = ranks // parallel.get("dense", {}).get("tp", 1) // parallel.get("pp", 1)
    count = 4 if "pp" in parallel else MICRO_BATCHES
    settings = {**SMALL["train"], "micro_batch": 1, **parts.get("train", {})}
    settings["tokens_per_step"] = count * copies * settings["seq_len"]
    return LayerCase(tokens=case.tokens, parts={**case.parts, "train": settings}, plugins=())


def stepped(case: LayerCase, *, early: bool) -> dict[str, Tensor]:
    """Norm and summed gradients of this rank after a step."""
    model, assembly, layout, shared = open_model(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with mock.patch.object(Gradients, "start_early", early) if not early else nullcontext(), IN_PLACE:
        engine = Engine.of(model, optimizer, layout, assembly.spec.train)
        assert engine.gradients.start_early is early
        result = engine.step(global_batch(assembly, layout, 0), 0.0, lambda *_: nullcontext())
    gradients = {piece.name: piece.of(piece.parameter.grad).clone() for piece in canonical_parameters(model)}
    shared.close()
    return {"the norm": torch.tensor(result.grad_norm), **gradients}


def both_ways(case: LayerCase) -> tuple[dict[str, Tensor], ...]:
    """Early, early again, and behind the last backward."""
    return stepped(case, early=True), stepped(case, early=True), stepped(case, early=False)


@pytest.mark.parametrize("world", quick(WORLDS, *QUICK))
def test_gradients_are_those_of_sums_behind_the_last_backward(pool: RankPool, world: str) -> None:
    """On two ranks bit for bit; on more the order of a sum is another one. Equal bits in every run."""
    ranks, _ = WORLDS[world]
    for early, again, late in pool.run(both_ways, ranks, case_of(world)):
        assert early.keys() == late.keys()
        for name, expected in late.items():
            assert same_bits(early[name], again[name]), name
            assert same_bits(early[name], expected) or worst_error(early[name], expected, floor=1e-30) < 2e-6, name
            if ranks == 2:
                assert same_bits(early[name], expected), name


def logged(case: LayerCase) -> list[str]:
    """Backwards of phases and sums of gradients in the last micro-batch, in order."""
    model, assembly, layout, shared = open_model(case)
    layers = {parameter: name.split(".")[1] for name, parameter in model.named_parameters() if "layers." in name}
    log: list[str] = []
    backward, start = InFlight.backward, Gradients._start

    def running(in_flight: InFlight) -> None:
        if len(in_flight.phases) > 1:  # the others run as one
            phase = in_flight.phases[len(in_flight._calls) - 1]
            used = {layers.get(each, "none") for module in phase.uses for each in module.parameters()}
            log.extend(f"backward of layer {each}" for each in sorted(used))
        backward(in_flight)

    def starting(gradients: Gradients, family: Any, parameters: Sequence[nn.Parameter]) -> None:
        log.extend(f"sum of layer {each}" for each in sorted({layers.get(p, "none") for p in parameters}))
        start(gradients, family, parameters)

    engine = Engine.of(model, torch.optim.SGD(model.parameters(), lr=0.0), layout, assembly.spec.train)
    with mock.patch.object(InFlight, "backward", running), mock.patch.object(Gradients, "_start", starting), IN_PLACE:
        engine.step(global_batch(assembly, layout, 0), 0.0, lambda *_: nullcontext())
    shared.close()
    return log


def test_the_sum_of_a_layer_starts_before_the_backward_of_the_next(pool: RankPool) -> None:
    first, second = pool.run(logged, 2, case_of("2 ranks, ep 2"))
    assert first == second
    # The last layer predicts a further token. Backward goes from it to the first.
    for layer in range(4, 0, -1):
        assert f"sum of layer {layer}" in first
        assert first.index(f"sum of layer {layer}") < first.index(f"backward of layer {layer - 1}")


def sums_in_place(case: LayerCase) -> tuple[int, int]:
    """Largest number of elements that a sum copies, and that of the largest gradient."""
    model, assembly, layout, shared = open_model(case)
    copied = [0]
    reduce = dist.all_reduce

    def reducing(tensor: Tensor, *arguments: Any, **settings: Any) -> Any:
        gradients = {each.grad.data_ptr() for each in model.parameters() if each.grad is not None}
        if settings.get("async_op") and tensor.data_ptr() not in gradients:
            copied.append(tensor.numel())
        return reduce(tensor, *arguments, **settings)

    engine = Engine.of(model, torch.optim.SGD(model.parameters(), lr=0.0), layout, assembly.spec.train)
    with mock.patch.object(dist, "all_reduce", reducing), IN_PLACE:
        engine.step(global_batch(assembly, layout, 0), 0.0, lambda *_: nullcontext())
    shared.close()
    return max(copied), max(each.numel() for each in model.parameters())


def test_large_gradients_are_summed_in_place(pool: RankPool) -> None:
    for copied, largest in pool.run(sums_in_place, 2, case_of("2 ranks")):
        assert copied < largest


def test_a_parameter_ends_with_its_first_use() -> None:
    embedding, block, head = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    head.weight = embedding.weight
    phases = [
        Phase(str, uses=(embedding,)),
        Phase(str, uses=(block,)),
        Phase(str, uses=(block,)),
        Phase(str),
        Phase(str, uses=(head,)),
    ]
    assert first_uses(phases) == [
        [embedding.weight, embedding.bias],
        [block.weight, block.bias],
        [],
        [],
        [head.bias],
    ]
