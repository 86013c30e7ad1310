"""The bf16 MoE layer beside its goals: against the matmul of the same run, other libraries, and physical limits.

Correctness comes first: output and gradients against fp32, and the output of every other library against ours. All
ways of one table alternate in one process; a time is the median over rounds. Shapes a, b and c are the layers of
Qwen3-30B-A3B, of a 30B model with 256 narrow experts, and of a 120B model with 64 wide ones (arXiv 2512.14080).

``--dry`` runs the same code on a CPU with small shapes, whose times say nothing.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from attrs import asdict, evolve
from torch import Tensor

import gemms
import goal
import peers
import record
import traced
from moe_layer import TINY, Gemm, Layer, Shape, off
from moefw.runtime.compute.weights import shared_by_micro_batches
from timing import device_to_measure, race, racing

BF16 = {"use": "bf16"}
SHAPES = {
    "a": Shape(tokens=32768, dim=2048, expert_dim=768, num_experts=128, top_k=8),
    "b": Shape(tokens=32768, dim=4096, expert_dim=256, num_experts=256, top_k=16),
    "c": Shape(tokens=32768, dim=4096, expert_dim=2048, num_experts=64, top_k=4),
}
CHECKED = Shape(tokens=2048, dim=1024, expert_dim=512, num_experts=16, top_k=4)
COARSE = Shape(tokens=32768, dim=4096, expert_dim=1024, num_experts=64, top_k=4)
"""As many operations as shape b, in a quarter of the experts."""
FEW_TOKENS = 1024
OF_MATMUL = {"a": (0.62, 0.55), "b": (0.48, 0.46), "c": (0.70, 0.66)}
"""Goals for the share of the matmul's rate, forward and whole."""
OF_PEER = {"hugging face": 1.9, "liger": 1.15, "scattermoe": 1.5}
ALLOWED = 0.02
"""Relative error of output and gradients against fp32, of the order of bf16's rounding of each operand."""
FEWEST = ["dispatch", "router"]
"""Regions to recompute so that the layer saves only its tokens and the pre-activation."""
WARM_UP = 3


def main() -> None:
    """Measure the parts in order, and write ``layer_goals.json`` after each. Exits with 1 if one fails."""
    parser = racing(__doc__, rounds=10)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    given = parser.parse_args()
    run = Run(dry=given.dry, rounds=given.rounds)
    errors = run.errors()
    wrong = [name for name, error in errors.items() if not error <= ALLOWED]
    print(f"errors against fp32: {errors}")
    found: dict[str, Any] = {"errors": errors, "allowed": ALLOWED, "wrong": wrong, "rounds": given.rounds}
    goals: list[goal.Goal] = []
    if not wrong:
        for name in given.only:
            try:
                found[name], more = PARTS[name](run)
            except RuntimeError as failure:  # such as no memory for one shape, which says nothing of the others
                traceback.print_exc()
                found[name], more = {"failed": str(failure)[:500]}, []
            goals += more
            print(goal.table(more), flush=True)
            record.write("layer_goals", {**found, "goals": goals}, dry=given.dry)
    print(record.write("layer_goals", {**found, "goals": goals}, dry=given.dry))
    sys.exit(bool(wrong) or any("failed" in found[name] for name in given.only))


@contextmanager
def in_a_step(*layers: Layer) -> Iterator[None]:
    """Let the calls of layers share the operands of their weights, as the micro-batches of a step do."""
    # Layers may share weights, too, and each is entered once.
    with shared_by_micro_batches(dict.fromkeys(chain.from_iterable(layer.module.parameters() for layer in layers))):
        yield


Measured = tuple[dict[str, Any], list[goal.Goal]]


class Run:
    """The device, the shapes and the limits of this run."""

    def __init__(self, *, dry: bool, rounds: int) -> None:
        self.dry = dry
        self.rounds = rounds
        self.device = device_to_measure(dry=dry)

    def shape(self, shape: Shape) -> Shape:
        """Return the shape, or in a dry run a small one."""
        return TINY if self.dry else shape

    def errors(self) -> dict[str, float]:
        """Return the errors of output and gradients in bf16 against fp32."""
        shape = self.shape(CHECKED)
        return off(Layer(BF16, self.device, shape).figures(), Layer({"use": "fp32"}, self.device, shape).figures())

    @cached_property
    def gemms(self) -> tuple[list[Gemm], dict[str, str]]:
        """The GEMMs of experts that are right here, and why each other one is left out."""
        shape = self.shape(CHECKED)
        candidates = gemms.gemms()
        layers, left_out = gemms.layers_of(candidates, shape, self.device)
        wanted = Layer({"use": "fp32"}, self.device, shape).figures()
        left_out |= gemms.wrong_ones(layers, wanted, ALLOWED)
        return [gemm for gemm in candidates if gemm.name not in left_out], left_out

    def race(self, ways: dict[str, Callable[[], object]], *layers: Layer) -> dict[str, float]:
        """Return the seconds of each way. Operands of weights are made while it warms up, as once in a step."""
        with in_a_step(*layers):
            return race(ways, self.rounds, warm_up=WARM_UP)

    def matmul(self) -> tuple[Callable[[], object], int]:
        """Return a large bf16 product and its operations."""
        size = 128 if self.dry else 8192
        a, b = torch.randn(2, size, size, device=self.device, dtype=torch.bfloat16)
        return lambda: a @ b, 2 * size**3

    def copy(self) -> tuple[Callable[[], object], int]:
        """Return a large copy and the bytes that it moves."""
        source, target = torch.randn(2, 1 << (10 if self.dry else 28), device=self.device)
        return lambda: target.copy_(source), 2 * source.nbytes

    def release(self) -> None:
        """Return freed memory to the GPU."""
        if not self.dry:
            torch.cuda.empty_cache()


def against_matmul(name: str) -> Callable[[Run], Measured]:
    """Return the measurement of a shape's rates and their shares of the matmul's."""

    def measure(run: Run) -> Measured:
        run.release()
        shape = run.shape(SHAPES[name])
        layer = Layer(BF16, run.device, shape)
        (matmul, operations) = run.matmul()
        seconds = run.race({"matmul": matmul, "forward": layer.forward, "fwd+bwd": layer.run}, layer)
        peak = operations / seconds["matmul"]
        rates = {"forward": shape.flops / seconds["forward"], "fwd+bwd": 3 * shape.flops / seconds["fwd+bwd"]}
        goals = [
            goal.at_least(f"8{name} {way}, share of the matmul's rate", rates[way] / peak, wanted)
            for way, wanted in zip(rates, OF_MATMUL[name], strict=True)
        ]
        tflops = {way: 1e-12 * rate for way, rate in {**rates, "matmul": peak}.items()}
        return {"shape": asdict(shape), "ms": _ms(seconds), "tflops": tflops}, goals

    return measure


def gemms_together(name: str) -> Callable[[Run], Measured]:
    """Return the measurement of a shape with each GEMM of experts, and with Liger, beside the matmul."""

    def measure(run: Run) -> Measured:
        run.release()
        shape = run.shape(SHAPES[name])
        right, left_out = run.gemms
        layers, _ = gemms.layers_of(right, shape, run.device)
        others, not_there = peers.peers(layers["grouped"], shape, run.device, names=("liger",))
        left_out = {**left_out, **not_there}
        for each, why in left_out.items():
            print(f"{name}, without {each}: {why}")
        (matmul, operations) = run.matmul()
        ways: dict[str, Callable[[], object]] = {"matmul": matmul}
        for each, layer in {**layers, **others}.items():
            ways |= {f"{each}, forward": layer.forward, f"{each}, fwd+bwd": layer.run}
        seconds = run.race(ways, *layers.values())
        peak = operations / seconds["matmul"]
        work = {"forward": shape.flops, "fwd+bwd": 3 * shape.flops}
        rates = {f"{each}, {way}": work[way] / seconds[f"{each}, {way}"] for each in (*layers, *others) for way in work}
        goals = [
            goal.at_least(f"8{name} {each}, {way}, share of the matmul's rate", share(rates, each, way, peak), wanted)
            for each in gemms.NAMES
            for way, wanted in zip(work, OF_MATMUL[name], strict=True)
        ]
        whole = {each: seconds.get(f"{each}, fwd+bwd") for each in (*gemms.NAMES, "liger")}
        goals += [
            goal.at_least(f"8{name} {each}, fwd+bwd over {other}", over(whole[each], whole[other]), wanted)
            for each, other, wanted in (
                *((each, "grouped", 1.0) for each in gemms.NAMES[1:]),
                *((each, "liger", OF_PEER["liger"]) for each in gemms.NAMES),
            )
        ]
        tflops = {way: 1e-12 * rate for way, rate in {**rates, "matmul": peak}.items()}
        return {"shape": asdict(shape), "ms": _ms(seconds), "tflops": tflops, "left_out": left_out}, goals

    return measure


def share(rates: Mapping[str, float], each: str, way: str, peak: float) -> float | None:
    """Return the share of the matmul's rate; None if it was not measured."""
    rate = rates.get(f"{each}, {way}")
    return None if rate is None else rate / peak


def over(mine_s: float | None, other_s: float | None) -> float | None:
    """Return how many times as fast mine is; None if one was not measured."""
    return None if mine_s is None or other_s is None else other_s / mine_s


def against_others(name: str) -> Callable[[Run], Measured]:
    """Return the measurement of a shape's speed over other libraries."""

    def measure(run: Run) -> Measured:
        run.release()
        shape = run.shape(SHAPES[name])
        mine = Layer(BF16, run.device, shape)
        others, left_out = peers.peers(mine, shape, run.device)
        ways: dict[str, Callable[[], object]] = {"ours, forward": mine.forward, "ours": mine.run}
        for peer, layer in others.items():
            ways |= {f"{peer}, forward": layer.forward, peer: layer.run}
        seconds = run.race(ways, mine)
        goals = [
            goal.at_least(
                f"9{name} fwd+bwd over {peer} {left_out.get(peer, '')}"[:64],
                seconds[peer] / seconds["ours"] if peer in others else None,
                wanted,
            )
            for peer, wanted in OF_PEER.items()
        ]
        return {"shape": asdict(shape), "ms": _ms(seconds), "left_out": left_out}, goals

    return measure


def granularity(run: Run) -> Measured:
    """Measure many narrow experts against a quarter as many, four times as wide: equal operations."""
    run.release()
    layers = {"narrow": Layer(BF16, run.device, run.shape(SHAPES["b"]))}
    layers["wide"] = Layer(BF16, run.device, run.shape(COARSE))
    ways = {f"{name}, forward": layer.forward for name, layer in layers.items()}
    seconds = run.race({**ways, **{name: layer.run for name, layer in layers.items()}}, *layers.values())
    forward = seconds["narrow, forward"] / seconds["wide, forward"]
    whole = seconds["narrow"] / seconds["wide"]
    goals = [goal.at_most("10 n 256 K 16 over n 1024 K 4, forward", forward, 1.35)]
    goals.append(goal.at_most("10 n 256 K 16 over n 1024 K 4, fwd+bwd", whole, 1.35))
    return {"ms": _ms(seconds)}, goals


def few_tokens(run: Run) -> Measured:
    """Measure 1,024 tokens against the time to read all weights twice and write their gradients."""
    run.release()
    shape = evolve(run.shape(SHAPES["a"]), tokens=TINY.tokens if run.dry else FEW_TOKENS)
    layer = Layer(BF16, run.device, shape)
    (copy, nbytes) = run.copy()
    seconds = run.race({"copy": copy, "ours": layer.run}, layer)
    floor = 3 * 2 * shape.weights / (nbytes / seconds["copy"])
    goals = [goal.at_most("11 T 1024, fwd+bwd over the traffic of bf16 weights", seconds["ours"] / floor, 2.0)]
    return {"shape": asdict(shape), "ms": {**_ms(seconds), "floor": 1e3 * floor}}, goals


def skew(run: Run) -> Measured:
    """Measure experts whose popularity falls as 1/rank against equally popular ones."""
    run.release()
    shape = run.shape(SHAPES["a"])
    routes = {name: drawn_experts(shape, run.device, exponent) for name, exponent in (("uniform", 0.0), ("zipf", 1.0))}
    layers = {name: Layer(BF16, run.device, shape, ids_TK=ids_TK) for name, ids_TK in routes.items()}
    seconds = run.race({name: layer.run for name, layer in layers.items()}, *layers.values())
    rows = {name: int(ids_TK.flatten().bincount().max()) for name, ids_TK in routes.items()}
    goals = [goal.at_most("Zipf over uniform routing, fwd+bwd", seconds["zipf"] / seconds["uniform"], 1.10)]
    return {"ms": _ms(seconds), "rows_of_the_largest_expert": rows}, goals


def counters(run: Run) -> Measured:
    """Count launches and host waits of forward and backward, and the bytes between them."""
    run.release()
    shape = run.shape(SHAPES["a"])
    layer = Layer(BF16, run.device, shape)
    with in_a_step(layer):
        layer.run()
        forward = traced.counts(layer.forward)
        both = traced.counts(layer.run)
    backward = {name: None if None in (both[name], forward[name]) else both[name] - forward[name] for name in both}
    minimum = 2 * shape.tokens * shape.dim + 4 * shape.rows * shape.expert_dim
    saved = {"keep": saved_bytes(layer, shape)}
    del layer
    fewest = Layer(BF16, run.device, shape, memory=[{"use": "recompute", "regions": FEWEST}])
    saved["recompute dispatch and router"] = saved_bytes(fewest, shape)
    least = saved["recompute dispatch and router"]["without_weights"]
    goals = [
        goal.at_most("kernel launches, forward", forward["launches"], 8),
        goal.at_most("kernel launches, backward", backward["launches"], 10),
        goal.at_most("11 host waits, forward", forward["host_waits"], 0),
        goal.at_most("11 host waits, backward", backward["host_waits"], 0),
        goal.at_most("2 saved bytes over 2TD + 4SF, by the allocator", least and least / minimum, 1.02),
    ]
    return {"forward": forward, "backward": backward, "saved": saved, "minimum": minimum}, goals


def saved_bytes(layer: Layer, shape: Shape) -> dict[str, int | None]:
    """Return the bytes that the allocator holds between forward and backward: the input too, the output not.

    ``without_weights`` leaves out the bf16 copies of the experts' weights. None on a CPU, which has no such allocator.
    """
    if layer.x_TD.device.type == "cpu":
        layer.forward()
        return {"whole": None, "without_weights": None}
    layer.run()
    layer.module.zero_grad()
    before = torch.cuda.memory_allocated()
    out_TD = layer.forward()
    whole = torch.cuda.memory_allocated() - before + layer.x_TD.nbytes - out_TD.nbytes
    return {"whole": whole, "without_weights": whole - 2 * shape.weights}


def drawn_experts(shape: Shape, device: torch.device, exponent: float) -> Tensor:
    """Return different experts for each token, int64 (T, K); the e-th has the popularity ``e ** -exponent``."""
    generator = torch.Generator(device).manual_seed(0)
    uniform_TE = torch.rand(shape.tokens, shape.num_experts, device=device, generator=generator)
    ranks_E = torch.arange(1, shape.num_experts + 1, device=device)
    scores_TE = -(-uniform_TE.log()).log() - exponent * ranks_E.log()  # the top k of these draw without replacement
    return scores_TE.topk(shape.top_k, dim=-1).indices


def _ms(seconds: dict[str, float]) -> dict[str, float]:
    return {name: round(1e3 * each, 4) for name, each in seconds.items()}


PARTS: dict[str, Callable[[Run], Measured]] = {
    "a": against_matmul("a"),
    "b": against_matmul("b"),
    "c": against_matmul("c"),
    "gemms-a": gemms_together("a"),
    "gemms-c": gemms_together("c"),
    "gemms-b": gemms_together("b"),
    "others-a": against_others("a"),
    "others-c": against_others("c"),
    "others-b": against_others("b"),
    "granularity": granularity,
    "few tokens": few_tokens,
    "skew": skew,
    "counters": counters,
}


if __name__ == "__main__":
    main()
