"""Handling of a step whose loss or gradient is not finite: stop, skip it, or run it again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal, final

import torch
from attrs import frozen
from torch import nn

from moefw.core.contracts import Layout
from moefw.core.errors import RunError
from moefw.training.faults.bad_values import bad_state, first_of_all
from moefw.training.faults.watched_step import StepWatch
from moefw.training.step_sums import Attempt

Policy = Literal["stop", "skip", "rerun"]

SKIPPED_STEPS = "skipped_steps"
RERUN_STEPS = "rerun_steps"
"""The metrics that are 1 in a step that was skipped, or whose second run counts; other steps do not have them."""

MAX_SKIPPED: Final = 10
"""Bad steps in a row after which a run stops: no single batch is the cause, and nothing is learned."""


class BadStateError(RunError):
    """A parameter or a state was not finite before a step. Only an earlier checkpoint helps."""


@frozen(eq=False)
class Verdict:
    """Decision on a bad step: ``attempt`` is the run that counts, ``metric`` the metric that records it.

    ``note`` is a line for the user.
    """

    attempt: Attempt
    metric: str
    note: str


@final
class BadSteps:
    """Decides on bad steps, the same on every rank. ``policy`` is ``train.on_bad_step``."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, layout: Layout, policy: Policy) -> None:
        self._model = model
        self._optimizer = optimizer
        self._layout = layout
        self._policy = policy
        self._skipped: list[int] = []

    def judge(self, number: int, bad: Attempt, again: Callable[[], Attempt], *, num_batches: int) -> Verdict:
        """Run step ``number`` again under watch, and return the decision. Collective.

        Raises RunError, which names the first bad tensor, if the policy is to stop or cannot help: a tensor was bad
        before the step (BadStateError), a second run is bad too, or too many steps in a row were skipped.
        """
        if before := first_of_all(bad_state(self._model, self._optimizer), self._layout):
            fix = "It was so before the step, so no other step is better."
            raise BadStateError(f"step {number}, {before}.", fix, on_every_rank=True)
        with StepWatch(self._model, num_batches) as watch:
            second = again()
        what = _message(number, bad, second, first_of_all(watch.first(), self._layout))
        if self._policy == "rerun" and second.finite:
            return Verdict(second, RERUN_STEPS, f"{what} The second run counts.")
        if self._policy == "skip":
            self._skipped = [*(step for step in self._skipped if step > number - MAX_SKIPPED), number]
            if len(self._skipped) < MAX_SKIPPED:
                return Verdict(bad, SKIPPED_STEPS, f"{what} It is skipped.")
            fix = f"{MAX_SKIPPED} steps in a row are bad: look at what the message names."
            raise RunError(what, fix, on_every_rank=True)
        raise RunError(what, _advice(self._policy, second), on_every_rank=True)


def _message(number: int, bad: Attempt, second: Attempt, tensor: str) -> str:
    seen = f"the loss was {bad.loss:.4g}, the gradient's norm {bad.grad_norm:.4g}"
    if second.finite:
        return f"step {number}: {seen}; run again, it is finite: the fault does not repeat itself."
    if not tensor:
        return f"step {number}: {seen}, and every tensor is finite: their sum is too large."
    return f"step {number}, {tensor}; {seen}."


def _advice(policy: Policy, second: Attempt) -> str:
    if second.finite:
        return "Use train.on_bad_step: rerun, and look at the machine: steps are deterministic."
    if policy == "rerun":
        return "It is reproducible: the second run is bad, too. Lower train.lr, or use train.on_bad_step: skip."
    return "Lower train.lr, look at the data, or use train.on_bad_step: skip."
