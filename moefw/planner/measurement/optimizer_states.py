"""The optimizer, measured: it is built for the parameters of the layers that run, and makes two steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import accumulate, product
from typing import final

import torch
from attrs import frozen
from torch import Tensor, nn

from moefw.compose.build import Shared
from moefw.compose.optimizer import build_optimizer
from moefw.core.contracts import Layout, Named
from moefw.core.records import Canonical, TrainedParameters
from moefw.planner.measurement.micro_batch import MicroBatch
from moefw.planner.report import Updated
from moefw.recording.fake_tensors import indices_without_values
from moefw.runtime.naming import by_parameter
from moefw.runtime.parallel.boxes import whole_shape
from moefw.runtime.parallel.holders import holdings
from moefw.runtime.parallel.homes import Stored
from moefw.runtime.parallel.trained import trained_parameters


@frozen(kw_only=True)
class States:
    """Bytes of states on the device and in host memory, and temporary bytes of a step."""

    device: int
    host: int
    passing: int


def measure_states(batch: MicroBatch, layout: Layout, shared: Shared) -> States:
    """States of all parameters that train, measured while an optimizer is built and makes one step.

    The optimizer gets parameters of this rank's shapes, fp32 without values, in a module with the model's names, and
    the facts of the model's own. Those of a layer that did not run are left out: the layer that stands for it counts
    that many times. With a rule for matrices none is left out: which ones a rank computes depends on all of them.

    ``device`` and ``host``: bytes of each state tensor when the step has ended, by where its storage lies, times the
    parameters that its own one stands for. ``passing``: the maximum, over all moments from before the build to the end
    of the step, of the bytes in use that were allocated since and are free at the end. It is not multiplied by the
    layers that a parameter stands for.

    A step that finds states is noted as work of the phase ``optimizer``, and the norm of gradients as work of
    ``gradients``. It is the second one, except with a rule, whose states are there before the first. It has as many
    operators as one over all parameters, if these take lists; what it reads and writes grows with the elements of those
    that did not run.
    """
    has_rule = batch.assembly.parts.optimizer.rule() is not None
    own = _stand_ins(batch, {} if has_rule else _num_alike(batch))
    before = batch.recorder.now
    optimizer = _first_step(batch, layout, shared, own, noted=has_rule)
    passing = _most_temporary(batch, before)
    elements = sum(number * parameter.numel() for parameter, number in own.stands_for.items())
    _later_step(batch, optimizer, own, growth=elements / max(1, own.elements), noted=not has_rule)
    device, host = _bytes_of_states(batch, optimizer, own)
    if not has_rule:
        with batch.recorder.places.phase("optimizer"):
            batch.operations.updates(Updated(parameters=elements, states=device + host))
    return States(device=device, host=host, passing=passing)


@final
class _Stored(nn.Module, Named):
    """Parameters of the optimizer that is measured. ``pieces``: of all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[Canonical] = []

    def canonical(self) -> Iterator[Canonical]:
        """Yield the pieces."""
        yield from self.pieces


@frozen(kw_only=True)
class _StandIns:
    """Parameters without values that the measured optimizer updates: as this rank stores those of the model, by name.

    ``stands_for``: the number of parameters of the model that each of them counts as.
    """

    module: _Stored
    by_name: Mapping[str, nn.Parameter]
    stands_for: Mapping[nn.Parameter, int]

    @property
    def elements(self) -> int:
        """Elements of all of them."""
        return sum(parameter.numel() for parameter in self.stands_for)

    def gradients(self) -> list[Tensor]:
        """Their gradients."""
        return [parameter.grad for parameter in self.stands_for if parameter.grad is not None]


def _stand_ins(batch: MicroBatch, num_alike: Mapping[nn.Parameter, int]) -> _StandIns:
    """Stand-ins of the parameters that train. ``num_alike``: see :func:`_num_alike`; others count once."""
    module = _Stored()
    pieces = dict(by_parameter(batch.model))
    by_name: dict[str, nn.Parameter] = {}
    stands_for: dict[nn.Parameter, int] = {}
    for name, parameter in batch.model.named_parameters():
        number = num_alike.get(parameter, 1)
        if not parameter.requires_grad or not number:
            continue
        shard = nn.Parameter(torch.empty(*batch.stored(parameter)))
        _register(module, name, shard)
        module.pieces += _pieces_like(name, shard, pieces[parameter])
        by_name[name] = shard
        stands_for[shard] = number
    return _StandIns(module=module, by_name=by_name, stands_for=stands_for)


def _first_step(
    batch: MicroBatch, layout: Layout, shared: Shared, own: _StandIns, *, noted: bool
) -> torch.optim.Optimizer:
    """The optimizer, built, with the states that its first step makes. ``noted``: whether that step is work."""
    assembly = batch.assembly
    facts = trained_parameters(batch.model).facts
    trained = TrainedParameters(own.by_name, {name: facts[name] for name in own.by_name})
    device = torch.device("cpu")
    with batch.recorder.places.phase("optimizer"):
        with assembly.registry.calling(assembly.parts.optimizer, "build()"):
            optimizer = build_optimizer(
                assembly, own.module, layout, device, shared, trained=trained, stored=_as_sharded(batch)
            )
        for parameter in own.stands_for:
            parameter.grad = torch.zeros_like(parameter)
        with indices_without_values(), batch.operations if noted else nullcontext():
            optimizer.step()
    return optimizer


def _later_step(
    batch: MicroBatch, optimizer: torch.optim.Optimizer, own: _StandIns, *, growth: float, noted: bool
) -> None:
    """Note the work of the norm of gradients, of their clipping and, if ``noted``, of a step that finds its states.

    ``growth``: elements of all parameters over those of the stand-ins.
    """
    places = batch.recorder.places
    gradients = own.gradients()
    with places.phase("gradients"), batch.operations.grown(growth):
        if gradients:
            torch._foreach_norm(gradients)
    with places.phase("optimizer"), batch.operations.grown(growth):
        if gradients and batch.assembly.spec.train.clip_norm is not None:
            torch._foreach_mul_(gradients, 1.0)
        if noted:
            with indices_without_values():
                optimizer.step()


def _bytes_of_states(batch: MicroBatch, optimizer: torch.optim.Optimizer, own: _StandIns) -> tuple[int, int]:
    """Bytes of all states on the device, and in host memory."""
    device_bytes = 0
    host_bytes = 0
    for parameter, number in own.stands_for.items():
        states = [state for state in optimizer.state[parameter].values() if isinstance(state, Tensor)]
        for state in states:
            if batch.recorder.is_off_device(state):
                host_bytes += number * state.nbytes
            else:
                device_bytes += number * state.nbytes
    return device_bytes, host_bytes


def _as_sharded(batch: MicroBatch) -> dict[str, Stored]:
    """How ranks store each parameter of a model that FSDP would shard, by name."""
    names = {parameter: name for name, parameter in batch.model.named_parameters()}
    return {
        names[holding.parameter]: Stored(holding=holding, sharded_dim=_sharded_dim(batch, holding.parameter))
        for holding in holdings(batch.model)
    }


def _sharded_dim(batch: MicroBatch, parameter: nn.Parameter) -> int | None:
    """Dimension along which ranks shard a parameter: the only one that is shorter on this rank; None: there is none."""
    sizes = zip(parameter.shape, batch.stored(parameter), strict=True)
    return next((dim for dim, (whole, own) in enumerate(sizes) if own < whole), None)


def _pieces_like(name: str, shard: nn.Parameter, pieces: Sequence[Canonical]) -> Iterator[Canonical]:
    """Yield pieces of a parameter, cut into named tensors of as many dimensions as those of ``pieces``.

    A rank that has some of the columns of a tensor has those of a larger one here, too: policies ask where they end.
    """
    dims = len(whole_shape(pieces[0]))
    part = pieces[0].shard
    part_of_columns = part if part is not None and part.dim == dims - 1 > 0 else None
    stacked = shard.shape[: shard.dim() - dims]
    for index in product(*map(range, stacked)):
        yield Canonical(".".join([name, *map(str, index)]), shard, index, part_of_columns)


def _num_alike(batch: MicroBatch) -> dict[nn.Parameter, int]:
    """Number of parameters that each parameter of a layer stands for; 0: its layer does not run.

    Parameters outside of layers are not in it. It is empty if all layers run.
    """
    if not any(layer.more for layer in batch.layers):
        return {}
    stands_for = {layer.number: layer.stands_for for layer in batch.layers}
    return {
        parameter: stands_for.get(number, 0)
        for number, layer in enumerate(batch.model.layers)
        for parameter in layer.parameters()
    }


def _register(root: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Register a parameter under a dotted name, with plain modules on the way to it."""
    *path, key = name.split(".")
    module = root
    for child in path:
        if not hasattr(module, child):
            module.add_module(child, nn.Module())
        module = getattr(module, child)
    module.register_parameter(key, parameter)


def _most_temporary(batch: MicroBatch, since: int) -> int:
    """Maximum of the bytes in use that were allocated after a moment and are free now."""
    recorder = batch.recorder
    changes = [0] * (recorder.now + 1 - since)
    for life in recorder.lives:
        if life.began > since and life.ended <= recorder.now:
            changes[life.began - since] += life.nbytes
            changes[life.ended - since] -= life.nbytes
    return max(accumulate(changes))
