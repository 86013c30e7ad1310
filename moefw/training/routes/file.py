"""The file of a step's routes, ``step-N.safetensors``: which experts each token of the global batch chose.

``layer.L`` (N, S, K), int16: expert ids by sequence, position and choice, for each layer with experts; -1 is a choice
that was dropped. ``ids_sha256`` (N, 32), uint8: the SHA-256 of each sequence's S input ids as int64, little-endian.
Sequences are in the order of the global batch, so that no layout is in the file.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from attrs import frozen
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from moefw.core.errors import DataError, Problem
from moefw.runtime.replayed_routes import wrong_ids
from moefw.system.files import replaced_file

DIGESTS: Final = "ids_sha256"
AGAIN: Final = "Record it again, with this spec."


def path_of(folder: Path, step: int) -> Path:
    """File of a step, which counts from 1 as in metrics."""
    return folder / f"step-{step}.safetensors"


def drop_after(folder: Path, step: int) -> None:
    """Remove the files of later steps, which a run that goes back trains anew. Files with other names stay."""
    for path in folder.glob("step-*.safetensors"):
        number = re.fullmatch(r"step-([1-9][0-9]*)\.safetensors", path.name)
        if number and int(number[1]) > step:
            path.unlink()


def layer_name(layer: int) -> str:
    """Name of a layer's tensor."""
    return f"layer.{layer}"


def digests(ids_NS: Tensor) -> Tensor:
    """Digests of sequences ``(N, S)``, int64: ``(N, 32)``, uint8."""
    rows = (hashlib.sha256(ids_S.cpu().numpy().astype("<i8").tobytes()).digest() for ids_S in ids_NS)
    return torch.tensor([[*digest] for digest in rows], dtype=torch.uint8)


def write(folder: Path, step: int, routes: Mapping[int, Tensor], ids_NS: Tensor) -> None:
    """Write a step's file, whole or not at all: int16 ``(N, S, K)`` by layer, and the ids that were routed."""
    path = path_of(folder, step)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {layer_name(layer): ids_NSK.contiguous() for layer, ids_NSK in routes.items()}
    with replaced_file(path) as scratch:
        save_file({**tensors, DIGESTS: digests(ids_NS)}, scratch)


@frozen(kw_only=True)
class Wanted:
    """What a run needs of each file: the layers with experts, E experts, top-k K, N sequences of S positions."""

    layers: tuple[int, ...]
    num_experts: int
    top_k: int
    sequences: int
    seq_len: int

    @property
    def tensors(self) -> dict[str, tuple[str, list[int]]]:
        """The dtype and shape of each tensor by name."""
        routes = ("I16", [self.sequences, self.seq_len, self.top_k])
        return {**{layer_name(layer): routes for layer in self.layers}, DIGESTS: ("U8", [self.sequences, 32])}

    def opened(self, folder: Path, step: int) -> Any:
        """A step's open file. Raises DataError with each tensor that is missing, left over or another."""
        path = path_of(folder, step)
        try:
            file = safe_open(path, "pt")
            problems = [*self._misfits(path, file)]
        except (SafetensorError, OSError, RuntimeError) as error:
            what = f"{path} is no whole safetensors file: {error}." if path.exists() else f"{path} is missing."
            problems = [Problem(what, AGAIN)]
        if problems:
            raise DataError(problems)
        return file

    def _misfits(self, path: Path, file: Any) -> Iterator[Problem]:
        here = dict.fromkeys(file.keys())
        for name in here.keys() - self.tensors.keys():
            yield Problem(f"{path} holds {name}, and the model has no such layer with experts.", AGAIN)
        for name, (dtype, shape) in self.tensors.items():
            if name not in here:
                yield Problem(f"{path} lacks {name}.", AGAIN)
                continue
            lazy = file.get_slice(name)
            dtype_there = lazy.get_dtype()
            shape_there = [*lazy.get_shape()]
            if (dtype_there, shape_there) != (dtype, shape):
                yield Problem(f"{path}: {name} is {dtype_there} {shape_there}, not {dtype} {shape}.", AGAIN)

    def check(self, ids_BSK: Tensor, where: str, first: int) -> Iterator[Problem]:
        """Yield what is wrong with expert ids of sequences from ``first`` on: out of range, or the same one twice."""
        for what, sequence, position in wrong_ids(ids_BSK, self.num_experts):
            at = f"sequence {first + sequence}, position {position}"
            yield Problem(f"{where}: {at} has {what}: {ids_BSK[sequence, position].tolist()}.", AGAIN)
