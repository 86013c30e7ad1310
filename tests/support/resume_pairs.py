"""Checkpoints that one layout writes and another one reads: eight unlike layouts of one model."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from layout_runs import EPS
from moefw.compose.assembly import Assembly
from moefw.compose.build import Shared, build_model, open_layout
from moefw.compose.defaults import defaults
from moefw.compose.optimizer import build_optimizer
from moefw.compose.resolve import assemble_tree
from moefw.compose.spec.source import Marks
from moefw.core.contracts import Layout
from moefw.core.errors import CheckpointError
from moefw.core.site import Machine
from moefw.runtime.naming import initialise
from moefw.runtime.parallel.local_shards import local
from moefw.testing.pool import RankPool
from moefw.testing.suites.runs import global_batch
from moefw.testing.training import SMALL
from moefw.training import checkpoint
from moefw.training.checkpoint import files, reading
from moefw.training.checkpoint.files import SavedPart
from moefw.training.checkpoint.parts import parts_of
from moefw.training.checkpoint.reading import Reader, opened
from moefw.training.checkpoint.slots import Slot, model_slots, optimizer_slots
from moefw.training.engine import Engine

STEP = 2
"""The step of the checkpoint; as many follow it."""
MODEL: Mapping[str, Any] = {
    **SMALL,
    "model": {**SMALL["model"], "vocab_size": 64, "num_layers": 4, "mtp_layers": 1, "tie_embeddings": True},
    "gemm": {"use": "grouped"},
    "train": {
        **SMALL["train"],
        "tokens_per_step": 192,
        "optimizer": {"use": "adamw", "eps": EPS},
    },
}
"""With a layer that predicts a further token, tied embeddings, and a bias of each expert that is a state."""


def _layout(ranks: int, micro_batch: int, **parts: Mapping[str, Any]) -> tuple[int, Mapping[str, Any]]:
    """Return the number of ranks of a layout, and its parts with the size of its micro-batches."""
    return ranks, {"train": {**MODEL["train"], "micro_batch": micro_batch}, **parts}


LAYOUTS: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "dp": _layout(2, 3, parallel={}),
    "FSDP on 3 ranks": _layout(3, 2, parallel={"dense": {"shard": "all"}, "experts": {"shard": "all"}}),
    "ep": _layout(2, 3, parallel={"experts": {"ep": 2}}),
    "tp x etp": _layout(2, 6, parallel={"dense": {"tp": 2}, "experts": {"etp": 2}}),
    "cp": _layout(2, 6, parallel={"dense": {"cp": 2}}),
    "pp, interleaved": _layout(2, 6, parallel={"pp": 2}, pipeline={"use": "interleaved"}),
    "pp x FSDP": _layout(4, 3, parallel={"pp": 2, "dense": {"shard": "all"}, "experts": {"shard": "all"}}),
    "tp x FSDP x ep": _layout(
        4, 3, parallel={"dense": {"tp": 2, "shard": "all"}, "experts": {"ep": 2, "shard": "all"}}
    ),
}
"""Each rank has two micro-batches of a step: gradients are added up, and a pipeline has two in flight."""
CHUNK_BYTES = 1 << 8
"""So small that most tensors have several chunks."""
PAIRS: Sequence[tuple[str, str]] = [(source, target) for source in LAYOUTS for target in LAYOUTS if source != target]
QUICK: Sequence[tuple[str, str]] = [*zip([*LAYOUTS][::2], [*LAYOUTS][1::2], strict=True)]
"""Four pairs in which each layout writes or reads."""

Stored = tuple[str, tuple[int, ...], tuple[int, ...], int]
"""What a rank stores of a tensor: its name, corner, shape and bytes."""


@frozen(kw_only=True)
class Written:
    """What a rank wrote and stored at a checkpoint, and the losses of the steps after it."""

    nbytes: int
    stored: Sequence[Stored]
    losses: Sequence[float]


@frozen(kw_only=True)
class Session:
    """A model of a layout on this rank."""

    assembly: Assembly
    layout: Layout
    model: nn.Module
    optimizer: torch.optim.Optimizer

    def steps(self, numbers: range) -> list[float]:
        """Take steps and return their losses."""
        engine = Engine.of(self.model, self.optimizer, self.layout, self.assembly.spec.train)
        return [
            engine.step(global_batch(self.assembly, self.layout, number), 1e-3, no_clock).loss for number in numbers
        ]

    def save(self, folder: Path) -> None:
        """Save the checkpoint of ``STEP`` in the run ``folder``."""
        checkpoint.save(folder, STEP, self.model, self.optimizer, self.layout, checkpoint.Origin(), keep=9)

    def slots(self, folder: Path) -> dict[str, Slot]:
        """Return what this rank fills from a checkpoint."""
        states, _ = optimizer_slots(self.model, self.optimizer, opened(of_step(folder)).tensors)
        return model_slots(self.model) | states


@contextmanager
def no_clock(*_: object) -> Iterator[None]:
    yield


def of_step(folder: Path) -> Path:
    """Return the folder of the checkpoint."""
    return folder / "checkpoints" / f"step-{STEP}"


@contextmanager
def session(name: str) -> Iterator[Session]:
    """Open the model of a layout on a rank of it."""
    tree = {**MODEL, **LAYOUTS[name][1]}
    world = dist.get_world_size() if dist.is_initialized() else 1
    machine = Machine(device="cpu")
    assembly = assemble_tree(tree, Marks(name), defaults=defaults(), world=world, machine=machine)
    layout = open_layout(assembly, "cpu")
    shared = Shared()
    model = build_model(assembly, layout, torch.device("cpu"), shared)
    std: Any = model.init_std
    initialise(model, seed=assembly.spec.run.seed, std=std)
    optimizer = build_optimizer(assembly, model, layout, torch.device("cpu"), shared)
    yield Session(assembly=assembly, layout=layout, model=model, optimizer=optimizer)
    shared.close()


def write(name: str, folder: Path) -> Written:
    """Train, save a checkpoint in small chunks, and go on."""
    with session(name) as opened_session, mock.patch.object(files, "CHUNK_BYTES", CHUNK_BYTES):
        opened_session.steps(range(STEP))
        parts = parts_of(opened_session.model, opened_session.optimizer, opened_session.layout)
        opened_session.save(folder)
        stored = [
            (tensor, corner, tuple(target.shape), target.nbytes)
            for tensor, slot in opened_session.slots(folder).items()
            for target, corner in slot.targets
        ]
        losses = opened_session.steps(range(STEP, 2 * STEP))
        return Written(nbytes=sum(part.values.nbytes for part in parts), stored=stored, losses=losses)


def read(name: str, source: Path, again: Path) -> list[float]:
    """Load a checkpoint, save it again as it is, and go on."""
    with session(name) as opened_session:
        group = opened_session.layout.host_group()
        checkpoint.load(of_step(source), opened_session.model, opened_session.optimizer, group=group)
        opened_session.save(again)
        return opened_session.steps(range(STEP, 2 * STEP))


@frozen(kw_only=True)
class Read:
    """What a rank read of a checkpoint: chunks as (file, tensor, number of the chunk), and which it had to read.

    ``allocated``: the bytes of the largest tensor that was made, other than states that the optimizer then has.
    ``stored``: those of the largest part of a tensor that the rank stores.
    """

    chunks: Sequence[tuple[str, str, int]]
    touched: frozenset[tuple[str, str, int]]
    allocated: int
    stored: int


def watch(name: str, folder: Path) -> Read:
    """Load a checkpoint, and see what is read and made."""
    chunks: list[tuple[str, str, int]] = []
    read_range = reading.read_range

    def watched(file: Any, start: int, part: SavedPart, chunk: range, into: memoryview | None) -> memoryview:
        chunks.append((Path(file.name).name, part.name, chunk.start // CHUNK_BYTES))
        return read_range(file, start, part, chunk, into)

    with session(name) as opened_session, mock.patch.object(reading, "read_range", watched):
        model, optimizer = opened_session.model, opened_session.optimizer
        slots = opened_session.slots(folder)
        with Made() as made:
            checkpoint.load(of_step(folder), model, optimizer, group=opened_session.layout.host_group())
        states = [value for state in optimizer.state.values() for value in state.values()]
        kept = {local(tensor).untyped_storage().data_ptr() for tensor in [*model.parameters(), *states]}
        return Read(
            chunks=chunks,
            touched=frozenset(_touched(opened(of_step(folder)), slots)),
            allocated=max(nbytes for place, nbytes in made.storages.items() if place not in kept),
            stored=max(target.nbytes for slot in slots.values() for target, _ in slot.targets),
        )


def refused(name: str, folder: Path) -> str:
    """Return the message with which a checkpoint is refused; empty if it is loaded."""
    with session(name) as opened_session:
        group = opened_session.layout.host_group()
        try:
            checkpoint.load(folder, opened_session.model, opened_session.optimizer, group=group)
        except CheckpointError as error:
            return str(error)
        return ""


def last_good(run_dir: Path) -> tuple[int, tuple[str, ...], set[str]]:
    """Return the step of the last checkpoint that is whole, why others are not, and the files that this rank read."""
    files: set[str] = set()
    read_range = reading.read_range

    def watched(file: Any, start: int, part: SavedPart, chunk: range, into: memoryview | None) -> memoryview:
        files.add(Path(file.name).name)
        return read_range(file, start, part, chunk, into)

    with mock.patch.object(reading, "read_range", watched):
        chosen = checkpoint.choose(run_dir, "last-good", dist.group.WORLD)
    assert chosen is not None
    return chosen.step, chosen.passed, files


class Made(TorchDispatchMode):
    """Notes the bytes of each storage that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu":
                storage = local(tensor).untyped_storage()
                self.storages[storage.data_ptr()] = storage.nbytes()
        return result


def _touched(reader: Reader, slots: Mapping[str, Slot]) -> Iterator[tuple[str, str, int]]:
    """Yield the chunks with an element that this rank stores, found by giving each element of a tensor a number."""
    stored_as = {other: name for file in reader.files for name, same in file.same.items() for other in same}
    wanted: dict[str, set[int]] = {}
    for name, slot in slots.items():
        for target, corner in slot.targets:
            wanted.setdefault(stored_as.get(name, name), set()).update(_numbers(slot.whole, corner, target.shape))
    for file in reader.files:
        for part in file.parts:
            numbers = _numbers(reader.tensors[part.name].shape, part.corner, part.shape)
            itemsize = part.nbytes // max(1, len(numbers))
            for number, chunk in enumerate(part.ranges(file.chunk_bytes)):
                if wanted.get(part.name, set()).intersection(numbers[chunk.start // itemsize : chunk.stop // itemsize]):
                    yield file.file, part.name, number


def _numbers(whole: Sequence[int], corner: Sequence[int], shape: Sequence[int]) -> list[int]:
    """Return the numbers of the elements of a box of a tensor."""
    numbers = torch.arange(math.prod(whole)).view(tuple(whole))
    box = tuple(slice(first, first + size) for first, size in zip(corner, shape, strict=True))
    return list(numbers[box].reshape(-1).tolist())


def tensors(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of the checkpoint."""
    reader = opened(of_step(folder))
    return {name: reader.read(name) for name in reader.tensors}


class Pairs:
    """Checkpoints of all layouts in a folder, each written when it is first asked for."""

    def __init__(self, pool: RankPool, folder: Path) -> None:
        self.pool, self.folder = pool, folder
        self.written = cache(self._write)

    def at(self, name: str) -> Path:
        """Return the run folder of a layout."""
        return self.folder / name.replace(" ", "-")

    def _write(self, name: str) -> list[Written]:
        return self.pool.run(write, LAYOUTS[name][0], name, self.at(name))

    def deviation(self, source: str, target: str) -> tuple[list[str], float]:
        """Return the tensors whose bits differ after loading, and the largest relative difference of a next loss."""
        written = self.written(source)
        again = self.folder / f"{self.at(source).name}-in-{self.at(target).name}"
        losses = self.pool.run(read, LAYOUTS[target][0], target, self.at(source), again)[0]
        wanted, got = tensors(self.at(source)), tensors(again)
        differing = [name for name in wanted.keys() | got.keys() if not same_bits(wanted, got, name)]
        pairs = zip(losses, written[0].losses, strict=True)
        return sorted(differing), max(abs(loss / own - 1) for loss, own in pairs)

    def read(self, source: str, target: str) -> list[Read]:
        """Return what each rank of a layout reads of the checkpoint of another one."""
        self.written(source)
        return self.pool.run(watch, LAYOUTS[target][0], target, self.at(source))

    def busiest(self, name: str) -> float:
        """Return the largest ratio of what a rank writes to its share: of each element that it stores, one copy's."""
        written = self.written(name)
        copies = Counter(box[:3] for rank in written for box in rank.stored)
        shares = [sum(box[3] / copies[box[:3]] for box in rank.stored) for rank in written]
        return max(rank.nbytes / share for rank, share in zip(written, shares, strict=True))


def same_bits(one: Mapping[str, Tensor], other: Mapping[str, Tensor], name: str) -> bool:
    """Return whether both have a tensor of this name with the same bits."""
    if name not in one or name not in other or one[name].dtype != other[name].dtype:
        return False
    return one[name].shape == other[name].shape and one[name].equal(other[name])
