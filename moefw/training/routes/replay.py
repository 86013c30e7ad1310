"""Replays recorded routes: batches get the expert ids of their tokens, which routers take in place of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, final

from attrs import frozen
from torch import Tensor

from moefw.core.contracts import Layout
from moefw.core.errors import DataError, MoefwError, Problem
from moefw.core.stages import Batch
from moefw.runtime.communication.agreement import raise_together
from moefw.runtime.parallel.own_tokens import own_tokens
from moefw.training.faults.blame import in_words
from moefw.training.routes.file import AGAIN, DIGESTS, Wanted, digests, layer_name, path_of

_FILES_TOLD: Final = 8
"""Wrong files whose problems are told one by one; of more, only the number."""


@final
@frozen(eq=False)
class Replay:
    """The routes in a folder, for a run on this rank. Each rank reads those of its own sequences."""

    folder: Path
    expected: Wanted
    layout: Layout

    def check(self, steps: range) -> None:
        """Check that each step (from 1) has a file with the right tensors. Collective; raises one DataError."""
        problems = [*self._problems(steps)] if self.layout.rank == 0 else []
        raise_together(DataError(problems) if problems else None, self.layout.host_group())

    def _problems(self, steps: range) -> Iterator[Problem]:
        """Yield what is wrong with the files of the first few steps that have a wrong one, and the missing files."""
        missing: list[int] = []
        wrong = 0
        for step in steps:
            if not path_of(self.folder, step).exists():
                missing.append(step)
                continue
            try:
                self.expected.opened(self.folder, step)
            except DataError as error:
                wrong += 1
                if wrong <= _FILES_TOLD:
                    yield from error.problems
        if wrong > _FILES_TOLD:
            yield Problem(f"{wrong:,} files in {self.folder} are wrong; the first {_FILES_TOLD} are named.", AGAIN)
        if len(missing) == 1:
            yield Problem(f"{path_of(self.folder, missing[0])} is missing.", AGAIN)
        elif missing:
            count = f"{len(missing):,} of {len(steps):,} are missing"
            yield Problem(f"{self.folder} has no file of {in_words(missing, 'step')}: {count}.", AGAIN)

    def given(self, step: int, batches: Sequence[Batch]) -> list[Batch]:
        """A step's micro-batches with their routes. Collective.

        Raises DataError on all ranks if an expert id is none, or if other tokens were routed.
        """
        problem = None
        routed: list[Batch] = []
        try:
            routed = self._routed(step, batches)
        except MoefwError as error:
            problem = error
        raise_together(problem, self.layout.host_group())
        return routed

    def _routed(self, step: int, batches: Sequence[Batch]) -> list[Batch]:
        file = self.expected.opened(self.folder, step)
        routed: list[Batch] = []
        first = self.layout.index("dp") * sum(len(batch.ids_BS) for batch in batches)
        for batch in batches:
            here = slice(first, first + len(batch.ids_BS))
            problems = self._other_tokens(step, file.get_slice(DIGESTS)[here], batch.ids_BS, first)
            routes: dict[int, Tensor] = {}
            for layer in self.expected.layers:
                ids_BSK = file.get_slice(layer_name(layer))[here].long()
                where = f"{path_of(self.folder, step)}: layer {layer} of step {step}"
                problems += self.expected.check(ids_BSK, where, first)
                routes[layer] = own_tokens(self.layout, ids_BSK).to(batch.ids_BS.device)
            if problems:
                raise DataError(problems)
            routed.append(replace(batch, routes=routes))
            first = here.stop
        return routed

    def _other_tokens(self, step: int, recorded: Tensor, ids_BS: Tensor, first: int) -> list[Problem]:
        other: Any = (recorded != digests(ids_BS)).any(1).nonzero().flatten().tolist()
        path = path_of(self.folder, step)
        what = f"{path}: sequence {{}} of step {step} holds other tokens here than where it was recorded."
        fix = f"Train on the same data, tokenizer, seq_len and seed. {AGAIN}"
        return [Problem(what.format(first + sequence), fix) for sequence in other[:1]]
