"""The parameters of a model around the passes of a step: what passes share of them, and when FSDP reduces gradients.

A run of micro-batches knows nothing else of them. There are two implementations: parameters that each rank holds whole,
here, and those that FSDP shards, in :mod:`moefw.training.sharded_parameters`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, final

import torch
from torch import nn

from moefw.core.records import Entry
from moefw.runtime.compute.weights import FORWARD, shared_by_micro_batches
from moefw.training.clock import Clock


class Reductions(Protocol):
    """Reductions by FSDP of the gradients of one step. A run says where it is, and they do what is due there.

    Where each micro-batch calls the model, FSDP reduces in its backward by itself: it has to be told which is the last.
    Where passes are played, it is told after each of them, and after all.
    """

    def before_last_backward(self) -> None:
        """Let the backward of the last micro-batch reduce what all of them add up."""

    def after_entry(self, entry: Entry, clock: Clock) -> None:
        """Reduce what a pass or pair that was played has left, if it had a backward. Collective."""

    def after_all(self, clock: Clock) -> None:
        """Reduce what the passes that were played have added up. Collective."""


class StepParameters(Protocol):
    """The parameters of a model while passes run. Weights must not change in the blocks of these methods."""

    def in_forward(self) -> AbstractContextManager[None]:
        """Block of forward passes that have no backward."""

    def in_step(self, num_batches: int) -> AbstractContextManager[Reductions]:
        """Block of the micro-batches of a step, each a call of the model and its backward."""

    def in_played_step(self, num_batches: int) -> AbstractContextManager[Reductions]:
        """Block of the micro-batches of a step, whose passes run outside of the model's forward."""


def step_parameters(model: nn.Module, *, main_gradients: torch.dtype = torch.float32) -> StepParameters:
    """The parameters of a model in the steps that it runs.

    ``main_gradients``: the dtype in which micro-batches add up the gradients of ZeRO 1 whole, before FSDP reduces them.
    """
    if not any(hasattr(module, "unshard") for module in model.modules()):
        return _WholeParameters(model)
    from moefw.training.sharded_parameters import ShardedParameters  # it imports FSDP, for a second

    return ShardedParameters(model, main_gradients=main_gradients)


@final
class _WholeParameters:
    """Parameters that each rank holds whole: micro-batches share operands of weights, and FSDP reduces nothing."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    @contextmanager
    def in_forward(self) -> Iterator[None]:
        with shared_by_micro_batches(self._model.parameters(), FORWARD):
            yield

    @contextmanager
    def in_step(self, num_batches: int) -> Iterator[Reductions]:
        with shared_by_micro_batches(self._model.parameters()):
            yield _NoReductions()

    def in_played_step(self, num_batches: int) -> AbstractContextManager[Reductions]:
        return self.in_step(num_batches)


@final
class _NoReductions:
    """Reductions of parameters that FSDP does not shard."""

    def before_last_backward(self) -> None:
        pass

    def after_entry(self, entry: Entry, clock: Clock) -> None:
        pass

    def after_all(self, clock: Clock) -> None:
        pass
