"""What lies there from step to step: parameters, gradients, optimizer, buffers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from attrs import frozen

from moefw.compose.assembly import Assembly
from moefw.core.facts import ANY
from moefw.core.plugin import OPTIMIZER, MemoryPlugin, OptimizerMemoryPlugin
from moefw.ledger.parts import FP32, INT64, ModelMemory, RankShape, StateRest, Weight
from moefw.ledger.protocols import SaysPlacements, SaysRest


@frozen(kw_only=True)
class Held:
    """Bytes of the device, but for ``host``: the states that wait on the host."""

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    batch: int
    host: int
    step_passing: int

    @property
    def device(self) -> int:
        """All of it on the device."""
        return self.parameters + self.gradients + self.optimizer + self.buffers + self.batch


def held(assembly: Assembly, model: ModelMemory, shape: RankShape, micro_batches: int) -> Held:
    """Return what the rank holds. A gradient is like its parameter; AdamW counts its steps in a scalar each."""
    weights = list(all_weights(model))
    elements = sum(weight.share(shape.shards[weight.side]) for weight in weights)
    rest, steps = _rest(assembly), len(weights) * FP32
    states = elements * rest.itemsize * len(assembly.parts.optimizer.states())
    return Held(
        parameters=elements * FP32,
        gradients=elements * FP32,
        optimizer=steps + (states if rest.on_device else 0),
        buffers=sum(layer.buffers for layer in model.layers),
        batch=micro_batches * 2 * INT64 * shape.all_tokens + INT64 * shape.sequences,
        host=0 if rest.on_device else states,
        step_passing=max(rest.passing, _summed_flat(weights, shape)),
    )


def all_weights(model: ModelMemory) -> Iterable[Weight]:
    """Yield every parameter of the rank."""
    yield from model.weights
    for layer in model.layers:
        yield from layer.weights


def unit_elements(weights: Iterable[Weight]) -> Mapping[str, int]:
    """Return the elements of each unit of weights, all shards together."""
    found: Counter[str] = Counter()
    for weight in weights:
        found[weight.unit] += weight.elements
    return found


def silent_policies(assembly: Assembly, shape: RankShape | None) -> list[str]:
    """Return the policies that do not say what they do with bytes, and an optimizer that names no states."""
    found = [f"memory: {plugin.name}" for plugin in assembly.parts.memory if not _says(plugin, shape)]
    if not assembly.parts.optimizer.states():
        found.append(f"train.optimizer: {assembly.parts.optimizer.name}")
    return found


def _says(plugin: MemoryPlugin, shape: RankShape | None) -> bool:
    if isinstance(plugin, OptimizerMemoryPlugin):
        return isinstance(plugin, SaysRest) and plugin.rests(StateRest()) is not None
    if plugin.passive or plugin.runs_again or shape is None:
        return True
    return isinstance(plugin, SaysPlacements) and plugin.placements((), shape) is not None


def _rest(assembly: Assembly) -> StateRest:
    """Return how states rest under all policies, in the order in which the optimizer offers them."""
    offered = assembly.parts.optimizer.offers(assembly.site)["region"]
    order = [] if offered == ANY else [mechanism for region, mechanism in offered if region == OPTIMIZER]
    policies = [one for one in assembly.parts.memory if isinstance(one, OptimizerMemoryPlugin)]
    rest = StateRest()
    for policy in sorted(policies, key=lambda one: order.index(one.mechanism) if one.mechanism in order else 0):
        rest = (policy.rests(rest) if isinstance(policy, SaysRest) else None) or rest
    return rest


def _summed_flat(weights: Iterable[Weight], shape: RankShape) -> int:
    """Return the bytes of the largest set of gradients that is added up flat over ranks that hold copies."""
    flat: Counter[str] = Counter()
    dense_copies = shape.axes.get("dp", 1) * shape.axes.get("cp", 1)
    for weight in weights:
        if weight.side == "experts":
            summed = shape.shards["experts"] == 1 and shape.axes.get("edp", 1) > 1
            name = "experts"
        else:
            name = "split" if weight.split and shape.tp > 1 else "whole"
            ranks = dense_copies if name == "split" else dense_copies * shape.tp
            summed = ranks > (dense_copies if shape.shards["dense"] > 1 else 1)
        flat[name] += weight.share(shape.shards[weight.side]) * FP32 if summed else 0
    return max(flat.values(), default=0)
