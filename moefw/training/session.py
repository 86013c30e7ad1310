"""A session: this rank's store, process group, layout, data and model, opened and closed together."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from moefw.compose.assembly import Assembly
from moefw.compose.build import Shared, build_model, open_layout
from moefw.core.contracts import Layout
from moefw.core.data import DataSource, TokenStream
from moefw.core.errors import MoefwError, PlanError
from moefw.core.stages import Batch
from moefw.runtime.communication.agreement import raise_together
from moefw.runtime.naming import initialise
from moefw.runtime.windows import number_documents, read_loss_masks, read_windows
from moefw.system.folders import cache_dir
from moefw.system.stamps import stamp
from moefw.training.errors import LostContactError
from moefw.training.faults.patience import collective_timeout_s
from moefw.training.faults.stamps import met
from moefw.training.rendezvous import meet
from moefw.training.resolved_spec import agree_on_spec
from moefw.training.versions import library_versions
from moefw.training.world import Place, threads_of_a_rank
from moefw_kernels.devices import is_gpu

Ids = np.ndarray[Any, np.dtype[np.int64]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True, kw_only=True)
class Session:
    """The objects that a command works with on this rank."""

    assembly: Assembly
    device: torch.device
    layout: Layout
    data: DataSource
    model: nn.Module
    shared: Shared

    @property
    def leads(self) -> bool:
        """Whether this rank prints to the user and writes shared files."""
        return self.layout.rank == 0

    @property
    def run_dir(self) -> Path:
        """The folder of the run that the spec names."""
        return Path(self.assembly.spec.run.dir)

    def in_run_dir(self, path: Path) -> str:
        """A path in the folder of the run, relative to it, as records name it."""
        return str(path.relative_to(self.run_dir))

    def read(self, stream: TokenStream, starts: Iterable[int], **more: Any) -> Batch:
        """Windows of a stream at ``starts`` as a batch; ``more`` is for :meth:`batch`."""
        train = self.assembly.spec.train
        windows_BS = read_windows(stream, starts, seq_len=train.seq_len, vocab_size=self.data.vocab_size)
        numbers_BS = number_documents(stream, starts, seq_len=train.seq_len) if train.masks_documents else None
        loss_mask_BS = read_loss_masks(stream, starts, seq_len=train.seq_len)
        return self.batch(windows_BS, documents_BS=numbers_BS, loss_mask_BS=loss_mask_BS, **more)

    def batch(
        self,
        windows_BS: Ids,
        *,
        documents_BS: Ids | None = None,
        loss_mask_BS: Bools | None = None,
        valid: int | None = None,
        seeds_B: Ids | None = None,
    ) -> Batch:
        """Windows ``(B, S+1)`` as a batch on the device; sequences from ``valid`` on are padding.

        ``documents_BS`` numbers the documents of the windows, ascending ``(B, S+1)``: positions restart in each, and
        the last token of a document is padding, because its label is in another one. None: a window is one document.
        ``loss_mask_BS`` ``(B, S)``: whether each label is trained on; None: all are. ``seeds_B`` seeds the random draws
        of each sequence; None: nothing is drawn.
        """
        tokens_BS = torch.from_numpy(windows_BS)
        mask_BS = None
        positions_BS = None
        if documents_BS is not None:
            mask_BS = torch.from_numpy(documents_BS[:, :-1] == documents_BS[:, 1:])
            documents_BS = documents_BS[:, :-1]
            positions_BS = self._placed(_positions(documents_BS))
        if valid is not None and valid < len(tokens_BS):
            mask_BS = torch.ones_like(tokens_BS[:, 1:], dtype=torch.bool) if mask_BS is None else mask_BS
            mask_BS[valid:] = False
        return Batch(
            ids_BS=tokens_BS[:, :-1].contiguous().to(self.device),
            labels_BS=tokens_BS[:, 1:].contiguous().to(self.device),
            mask_BS=None if mask_BS is None else mask_BS.to(self.device),
            loss_mask_BS=self._placed(loss_mask_BS),
            positions_BS=positions_BS,
            documents_BS=self._placed(documents_BS),
            seeds_B=self._placed(seeds_B),
        )

    def _placed(self, values: Ids | Bools | None) -> torch.Tensor | None:
        return None if values is None else torch.from_numpy(np.ascontiguousarray(values)).to(self.device)


def _positions(documents_BS: Ids) -> Ids:
    """Position of each token in its document, or in the part of it that the window holds."""
    place_S = np.arange(documents_BS.shape[1])
    starts_BS = np.diff(documents_BS, axis=1, prepend=documents_BS[:, :1]) != 0
    return place_S - np.maximum.accumulate(np.where(starts_BS, place_S, 0), axis=1)


@contextmanager
def joined_world(assembly: Assembly, place: Place) -> Iterator[torch.device]:
    """Join the world and agree on the spec; yield this rank's device. Collective.

    Raises problems of the spec on every rank, and LostContactError where another rank was lost inside.
    """
    device = device_of(assembly.site.machine.device, place)
    with joined(device, place, timeout_s=assembly.spec.run.timeout_s):
        stamp("agreeing on the spec")
        agree_on_spec(assembly, library_versions(device))
        yield device


@contextmanager
def joined(device: torch.device, place: Place, *, timeout_s: float) -> Iterator[None]:
    """Join the world, with the threads of a rank. Collective.

    ``timeout_s``: how long a rank may go without progress. Raises LostContactError where another rank was lost inside.
    """
    torch.set_num_threads(threads_of_a_rank(place.local_world))
    if place.world > 1:
        stamp("joining the other ranks")
        timeout = timedelta(seconds=collective_timeout_s(timeout_s))
        os.environ["LOCAL_WORLD_SIZE"] = str(place.local_world)
        store = meet(place, timeout=timeout)
        backend = _backend(device, dist.PrefixStore("gpus", store), place.world)  # type: ignore[attr-defined]
        _join(backend, device, store=store, rank=place.rank, world_size=place.world, timeout=timeout)
        met(store)
    ended_well = False
    try:
        yield
        ended_well = True
    except RuntimeError as error:
        if not lost_a_rank(error):
            raise
        what = f"rank {place.rank} lost contact with another rank."
        raise LostContactError(what, "The rank that failed says why; continue with --resume.") from error
    finally:
        if dist.is_initialized() and (ended_well or dist.get_backend() == "gloo"):
            dist.destroy_process_group()


@contextmanager
def open_session(assembly: Assembly, place: Place) -> Iterator[Session]:
    """Join the world, agree on the spec, prepare data, build and initialise the model. Collective.

    Raises problems of spec and data on every rank. Frees everything on exit. A rank that fails frees only what it can
    without the others, so that it reports the reason before they time out.
    """
    with joined_world(assembly, place) as device:
        shared = Shared()
        ended_well = False
        try:
            parts = assembly.parts
            calling = assembly.registry.calling
            with calling(parts.parallel, "build()"):
                layout = open_layout(assembly, device.type)
            stamp("preparing data")
            with calling(parts.data, "prepare()"):
                data = _prepare_once(assembly, place, layout)
            stamp("building the model", slow=True)
            model = build_model(assembly, layout, device, shared)
            std: Any = model.init_std
            initialise(model, seed=assembly.spec.run.seed, std=std)
            yield Session(assembly=assembly, device=device, layout=layout, data=data, model=model, shared=shared)
            ended_well = True
        finally:
            with nullcontext() if ended_well else suppress(Exception):  # the first failure is reported
                shared.close(together=ended_well)


def lost_a_rank(error: Exception) -> bool:
    """Whether an error is a broken connection; gloo has no class for it."""
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower()


def device_of(kind: str, place: Place) -> torch.device:
    """Device of a rank. ``kind``: cpu or cuda. Raises PlanError where there is none."""
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise PlanError(
            "run.device is cuda, and this PyTorch finds no GPU.", "Use run.device: cpu, or see `moefw doctor`."
        )
    device = torch.device("cuda", place.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _backend(device: torch.device, store: Any, world: int) -> str:
    """NCCL if every rank has its own GPU; gloo on CPUs, and if ranks share a GPU, which NCCL refuses.

    Ranks count the users of each GPU by its UUID, as each may see only its own, under the same index. Collective.
    """
    if not is_gpu(device):
        return "gloo"
    uuid = torch.cuda.get_device_properties(device).uuid
    if store.add(f"{socket.gethostname()} {uuid}", 1) > 1:
        store.set("shared", "")
    if store.add("ranks", 1) == world:
        store.set("all", "")
    store.wait(["all"])
    return "gloo" if store.check(["shared"]) else "nccl"


def _join(backend: str, device: torch.device, **world: Any) -> None:
    """Join the world. NCCL is told its GPU, so that it connects at once."""
    dist.init_process_group(backend, device_id=device if backend == "nccl" else None, **world)


def _prepare_once(assembly: Assembly, place: Place, layout: Layout) -> DataSource:
    """Prepare the data on the first rank of each machine, and open the prepared files on the others."""
    source = assembly.parts.data
    if place.world == 1:
        return _fitting(source.prepare(cache_dir()), assembly)
    data: DataSource | None = None
    problem: MoefwError | None = None
    if place.local_rank == 0:
        try:
            data = _fitting(source.prepare(cache_dir()), assembly)
        except MoefwError as error:
            problem = error
    raise_together(problem, layout.host_group())
    return source.prepare(cache_dir()) if data is None else data


def _fitting(data: DataSource, assembly: Assembly) -> DataSource:
    room = getattr(assembly.parts.model, "vocab_size", None)
    if room is not None and data.vocab_size > room:
        what = f"the tokenizer has {data.vocab_size} ids and model.vocab_size is {room}."
        raise PlanError(what, f"Use model.vocab_size: {data.vocab_size}.")
    train = assembly.spec.train
    if train.masks_documents:
        option, off = ("document_mask", "false") if train.packing == "none" else ("packing", "none")
        for stream in (data.train, data.heldout):
            if stream.document_starts(0, 1) is None:
                what = f"{stream.name or type(stream).__name__} does not tell where documents start."
                fix = f"Use train.{option}: {off}, or a source that tells."
                raise PlanError(f"train.{option} keeps documents apart, and {what}", fix)
    return data
