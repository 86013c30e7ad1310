"""Parameters that FSDP shards, in a step: gathered as their stages of ZeRO say, and their gradients reduced.

Importing this takes a second, so only models that FSDP shards import it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, final

import torch
from torch import nn

from moefw.core.records import PASSES, Entry
from moefw.runtime.compute.weights import FORWARD, Accumulator, shared_by_micro_batches
from moefw.runtime.parallel.sharding import gathered, reduce_pass
from moefw.runtime.parallel.unsharded_gradients import added_up_unsharded
from moefw.runtime.parallel.zero import kept, sharded_parameters, units
from moefw.system.stamps import stamp
from moefw.training.clock import Clock


@final
class ShardedParameters:
    """Parameters that FSDP shards. Micro-batches share the gathered weights of ZeRO 1 and 2, too."""

    def __init__(self, model: nn.Module, *, main_gradients: torch.dtype) -> None:
        self._model = model
        self._main_gradients = main_gradients

    @contextmanager
    def in_forward(self) -> Iterator[None]:
        """Block of forward passes that gather the weights of ZeRO 1 and 2 once."""
        with kept(self._model), shared_by_micro_batches(self._with_operands(), FORWARD):
            yield

    @contextmanager
    def in_step(self, num_batches: int) -> Iterator[_Reductions]:
        """Block of micro-batches that call the model: FSDP reduces as backward goes, and ZeRO 1 in the last one."""
        with kept(self._model):
            with_operands = self._with_operands()  # while modules have these: units that are gathered have others
            with (
                self._added_up(num_batches) as (sums, reduce_next),
                shared_by_micro_batches(with_operands, gathered=sums),
            ):
                yield _Reductions(self._model, num_batches, reduce_next)

    @contextmanager
    def in_played_step(self, num_batches: int) -> Iterator[_Reductions]:
        """Block of micro-batches whose passes are played: the root unit stays gathered, and reduces only when told."""
        with gathered(self._model), self.in_step(num_batches) as reductions:
            yield reductions

    def _with_operands(self) -> list[nn.Parameter]:
        """Parameters of which what products or other ranks read is made once for all passes.

        What a rank sends of a weight that is gathered once need not be kept for another time.
        """
        gathered_once = sharded_parameters(self._model, 1, 2)
        return [parameter for parameter in self._model.parameters() if parameter not in gathered_once]

    def _added_up(
        self, num_batches: int
    ) -> AbstractContextManager[tuple[Mapping[nn.Parameter, Accumulator], Callable[[], None]]]:
        """Block in which micro-batches add up the gradients of ZeRO 1 whole. One alone has nothing to add up."""
        if num_batches == 1:
            return nullcontext(({}, _reduce_anyway))
        return added_up_unsharded(self._model, self._main_gradients)


def _reduce_anyway() -> None:
    """The backward of a single micro-batch reduces without being told to."""


@final
class _Reductions:
    """Reductions of the gradients of the units of a model in one step: after each backward, or once after all."""

    def __init__(self, model: Any, num_batches: int, reduce_next: Callable[[], None]) -> None:
        self._model = model
        self._reduce_next = reduce_next
        # Here and not for each pass: it looks through all modules of the model.
        self._once = units(model, 1) if num_batches > 1 else []
        self._each_time = [unit for unit in units(model) if unit not in self._once]

    def before_last_backward(self) -> None:
        self._reduce_next()

    def after_entry(self, entry: Entry, clock: Clock) -> None:
        last_pass = entry.passes[-1].kind  # of a pair it is the backward
        if last_pass != "F" and self._each_time:
            with clock(PASSES[last_pass]):
                reduce_pass(self._model, with_root=self._model not in self._once)

    def after_all(self, clock: Clock) -> None:
        if self._once:
            with clock(PASSES["W"]):
                stamp("reduction of gradients")
                self._reduce_next()
                reduce_pass(self._model)
