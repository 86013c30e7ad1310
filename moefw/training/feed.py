"""The micro-batches of a training step, read from the text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from attrs import field, frozen

from moefw.core.stages import Batch
from moefw.runtime.parallel.cp_blocks import block_sizes
from moefw.runtime.windows import masks_losses, read_ids, read_trained
from moefw.training.data.blend_order import BlendOrder, training_order
from moefw.training.data.order import BatchOrder
from moefw.training.data.packing.schedule import Pack, Room, schedule, token_work
from moefw.training.data.packing.sequences import SequenceOrder, Sequences, sequence_order
from moefw.training.seeds import sequence_seeds
from moefw.training.session import Session


@frozen
class Windows:
    """Sequences of one length, ``micro_batch`` at a time."""

    session: Session
    order: BatchOrder | BlendOrder

    def micro_batches(self, step: int) -> Iterator[Batch]:
        """Yield this rank's share of the sequences of a step (from 0)."""
        session = self.session
        size = self.session.assembly.spec.train.micro_batch
        starts = self.order.starts(step)
        each = len(starts) // session.layout.size("dp")
        begin = session.layout.index("dp") * each
        mine = starts[begin:][:each]
        numbers = self.order.first(step) + np.arange(begin, begin + each)
        seeds = sequence_seeds(session.assembly.spec.run.seed, numbers)
        for first in range(0, each, size):
            chosen = slice(first, first + size)
            yield session.read(session.data.train, mine[chosen], seeds_B=seeds[chosen])


@frozen
class Packs:
    """Sequences of mixed length in packs: see :func:`moefw.training.data.packing.schedule.schedule`."""

    session: Session
    order: SequenceOrder
    room: Room = field(init=False)

    @room.default
    def _room(self) -> Room:
        layout = self.session.layout
        spec = self.session.assembly.spec.train
        cp = layout.size("cp")
        return Room(
            dp=layout.size("dp"),
            cp=cp,
            tp=layout.size("tp"),
            tokens=spec.micro_batch * spec.seq_len // cp,
            sizes=block_sizes(cp) if spec.packing == "dynamic" else (cp,),
            token_work=token_work(self.session.assembly.site.dims),
        )

    def micro_batches(self, step: int) -> Iterator[Batch]:
        """Yield this rank's packs of a step (from 0). Every rank has equally many, some of them empty."""
        sequences = self.order.sequences(step)
        layout = self.session.layout
        for by_rank in schedule(sequences.lengths_N.tolist(), self.room):
            yield self._batch(by_rank[layout.index("dp")][layout.index("cp")], sequences)

    def _batch(self, pack: Pack, sequences: Sequences) -> Batch:
        session = self.session
        chosen = [*pack.sequences]
        starts = sequences.starts_N[chosen].tolist()
        lengths = sequences.lengths_N[chosen].tolist()
        numbers = sequences.numbers_N[chosen] if chosen else np.zeros(1, np.int64)
        held = self.room.held(lengths, pack.size)
        ids_2S = np.zeros((2, sum(held)), np.int64)
        valid_S = np.zeros(sum(held), bool)
        trained_S = np.ones(sum(held), bool)
        stream = session.data.train
        has_prompts = masks_losses(stream)
        for start, length, at in zip(starts, lengths, np.cumsum(held) - held, strict=False):
            read = read_ids(stream, start, length + 1, session.data.vocab_size)
            place = slice(at, at + length)
            ids_2S[0, place] = read[:-1]
            ids_2S[1, place] = read[1:]  # the labels: the ids that follow
            valid_S[place] = True
            if has_prompts:
                trained_S[place] = read_trained(stream, start + 1, length)
        positions_S = np.concatenate([np.arange(length) for length in held])
        documents_S = np.repeat(np.arange(len(held)), held)

        def row(values: np.ndarray[Any, Any]) -> torch.Tensor:
            return torch.from_numpy(values).unsqueeze(0).to(session.device)

        return Batch(
            ids_BS=row(ids_2S[0]),
            labels_BS=row(ids_2S[1]),
            mask_BS=None if valid_S.all() else row(valid_S),
            loss_mask_BS=row(trained_S) if has_prompts else None,
            positions_BS=row(positions_S),
            documents_BS=row(documents_S),
            lengths=tuple(held),
            cp=pack.size if len(self.room.sizes) > 1 else None,
            seeds_B=torch.from_numpy(sequence_seeds(session.assembly.spec.run.seed, numbers)).to(session.device),
        )


Feed = Windows | Packs


def feed_of(session: Session) -> Feed:
    """Micro-batches of a run: a pure function of seed and step. Raises DataError if there is too little text."""
    spec = session.assembly.spec.train
    seed = session.assembly.spec.run.seed
    sizes = {"seq_len": spec.seq_len, "sequences_per_step": spec.tokens_per_step // spec.seq_len}
    if spec.packing == "none":
        return Windows(session, training_order(session.data, seed=seed, **sizes))
    return Packs(session, sequence_order(session.data, seed=seed, **sizes))
