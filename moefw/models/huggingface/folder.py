"""The tensors of a Hugging Face folder: files are checked before a value is read, codes become bf16 piece by piece."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from attrs import evolve, frozen
from safetensors import SafetensorError, safe_open
from torch import Tensor

from moefw.core.errors import CheckpointError, Problem
from moefw.models.huggingface.origins import Origin

INDEX: Final = "model.safetensors.index.json"
PICKLES: Final = (".bin", ".pt", ".pth", ".ckpt")
BLOCK: Final = 128
"""Rows, and columns, of a weight in FP8 that share a scale."""
DTYPES: Final[Mapping[str, torch.dtype]] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
}
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Stored(Protocol):
    """A tensor of a folder, perhaps as codes."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the values."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""

    def read(self, first: int | None) -> Tensor:
        """Return the values: all, or those at ``first`` of the first dimension."""


@frozen(eq=False)
class Plain:
    """A tensor that is stored as it is. ``lazy`` is a slice of an open file."""

    lazy: Any
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self, first: int | None) -> Tensor:
        """Return the values."""
        values: Tensor = self.lazy[:] if first is None else self.lazy[first]
        return values


@frozen(eq=False)
class Fp8:
    """A weight in FP8 and its scales, one for each block of 128 by 128 (DeepSeek-V3, arXiv 2412.19437 section 3.3)."""

    codes: Plain
    scales: Plain
    dtype: torch.dtype = torch.bfloat16

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        return self.codes.shape

    def read(self, first: int | None) -> Tensor:
        """Return ``codes * scale``, rounded once. Blocks of rows in turn, so that little is held in fp32."""
        codes, scales = self.codes.read(first), self.scales.read(first).float()
        values = torch.empty(codes.shape, dtype=self.dtype)
        for block, start in enumerate(range(0, codes.shape[-2], BLOCK)):
            rows = codes[..., start : start + BLOCK, :].float()
            wide = scales[..., block : block + 1, :].repeat_interleave(BLOCK, -1)[..., : rows.shape[-1]]
            values[..., start : start + BLOCK, :] = rows.mul_(wide)
        return values


@frozen(eq=False)
class Mxfp4:
    """A stack of weights in MXFP4, 32 codes a scale (OCP MX 1.0); as values each is the transpose of what is stored.

    ``codes`` (E, O, I / 32, 16), two in a byte, the lower one first; ``scales`` (E, O, I / 32), exponents plus 127.
    """

    codes: Plain
    scales: Plain
    dtype: torch.dtype = torch.bfloat16

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the values, (E, I, O)."""
        experts, rows, blocks, _ = self.codes.shape
        return experts, 32 * blocks, rows

    def read(self, first: int | None) -> Tensor:
        """Return the values, exact in bf16."""
        codes, scales = self.codes.read(first), self.scales.read(first)
        table = torch.tensor([*_FP4, *(-value for value in _FP4)])
        values = torch.empty(*codes.shape[:-2], 32 * codes.shape[-2], dtype=self.dtype)
        for start in range(0, codes.shape[-3], BLOCK):  # in turn, so that little is held in wider dtypes
            rows, exponents = codes[..., start : start + BLOCK, :, :], scales[..., start : start + BLOCK, :].int() - 127
            pairs = torch.stack([table[(rows & 15).int()], table[(rows >> 4).int()]], dim=-1)
            values[..., start : start + BLOCK, :] = torch.ldexp(pairs.flatten(-2), exponents.unsqueeze(-1)).flatten(-2)
        return values.mT


class Folder:
    """The tensors of a folder by name. Raises CheckpointError with all that is wrong with its index and files."""

    def __init__(self, path: Path) -> None:
        self.path, self._problems = path, list[Problem]()
        found: dict[str, Plain] = {}
        for file, names in self._files().items():
            found |= self._opened(file, names)
        self.tensors: Mapping[str, Stored] = dict(self._decoded(found))
        if self._problems:
            raise CheckpointError(self._problems)

    def read(self, origin: Origin) -> Tensor:
        """Return the values of a parameter. Only its bytes are read, and those of its own expert."""
        stored = self.tensors[origin.name]
        if origin.cut and isinstance(origin.cut[0], int):
            part: Tensor = evolve(origin, cut=origin.cut[1:]).of(stored.read(origin.cut[0]))
            return part
        whole: Tensor = origin.of(stored.read(None))
        return whole

    def shape(self, origin: Origin) -> tuple[int, ...] | None:
        """Return the shape of a parameter; None if the tensor has no such piece."""
        try:
            return tuple(origin.of(torch.empty(self.tensors[origin.name].shape, device="meta")).shape)
        except (IndexError, RuntimeError):
            return None

    def _tell(self, what: str, fix: str) -> None:
        self._problems.append(Problem(what, fix))

    def _files(self) -> dict[Path, frozenset[str] | None]:
        """Return the files, each with the tensors that the index places in it; None: there is no index."""
        index = self.path / INDEX
        if index.is_file():
            return self._indexed(index)
        files = sorted(self.path.glob("*.safetensors")) if self.path.is_dir() else []
        if not files:
            pickles = [path.name for path in self._listing() if path.suffix in PICKLES]
            what = f"{self.path} holds no model.safetensors"
            what += f", only {pickles[0]}, a pickle, which could run any code." if pickles else "."
            self._tell(what, "Save the model with save_pretrained of a current transformers, which writes safetensors.")
        return dict.fromkeys(files)

    def _listing(self) -> Iterable[Path]:
        return sorted(self.path.iterdir()) if self.path.is_dir() else ()

    def _indexed(self, index: Path) -> dict[Path, frozenset[str] | None]:
        try:
            places = json.loads(index.read_text())["weight_map"]
            known = all(isinstance(name, str) and isinstance(file, str) for name, file in places.items())
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            known, places = False, {}
        if not known:
            self._tell(f"{index} is no index: it has no weight_map of tensors and files.", "Download it again.")
            return {}
        files: dict[Path, frozenset[str] | None] = {}
        for file in sorted(set(places.values())):
            if Path(file).name != file or not file.endswith(".safetensors"):
                what = f"{index} places tensors in {file!r}, which is no safetensors file of this folder."
                self._tell(what, "Download it again.")
            else:
                files[self.path / file] = frozenset(name for name, place in places.items() if place == file)
        return files

    def _opened(self, path: Path, names: frozenset[str] | None) -> dict[str, Plain]:
        """Return the tensors of a file, whose header must describe the file's bytes, and be as the index says."""
        if (path.is_symlink() and not path.exists()) or not path.is_file():
            self._tell(f"{path} is missing.", "Download it.")
            return {}
        try:
            file = safe_open(path, "pt")
            here = frozenset(file.keys())
        except (SafetensorError, OSError, RuntimeError) as error:
            self._tell(f"{path} is no whole safetensors file: {error}.", "Download it again.")
            return {}
        found = {}
        for name in sorted(here):
            lazy = file.get_slice(name)
            if lazy.get_dtype() not in DTYPES:
                self._tell(f"{path}: {name} is {lazy.get_dtype()}, which no weight is.", "Download it again.")
            else:
                found[name] = Plain(lazy, tuple(lazy.get_shape()), DTYPES[lazy.get_dtype()])
        if names is not None:
            for name in sorted(here ^ names):
                where = "the index does not place it there" if name in here else "the file lacks it"
                self._tell(f"{path}: {name} is misplaced: {where}.", "Download file and index again.")
        return found

    def _decoded(self, found: Mapping[str, Plain]) -> Iterable[tuple[str, Stored]]:
        """Yield every tensor by the name of its values."""
        for name, plain in found.items():
            scales = found.get(f"{name}_scale_inv")
            if name.endswith("_scale_inv") and name.removesuffix("_scale_inv") in found:
                continue
            if name.endswith("_scales") and f"{name.removesuffix('_scales')}_blocks" in found:
                continue
            if scales is not None:
                yield from self._fp8(name, plain, scales)
            elif plain.dtype is torch.float8_e4m3fn:
                self._tell(f"{self.path}: {name} is FP8 and has no {name}_scale_inv.", "Download the folder again.")
            elif name.endswith("_blocks"):
                yield from self._mxfp4(name.removesuffix("_blocks"), plain, found)
            elif plain.dtype is torch.uint8:
                self._tell(f"{self.path}: {name} is packed in an unknown way.", "Use a folder in bf16, FP8 or MXFP4.")
            else:
                yield name, plain

    def _fp8(self, name: str, codes: Plain, scales: Plain) -> Iterable[tuple[str, Stored]]:
        *leading, rows, columns = codes.shape if len(codes.shape) > 1 else (1, *codes.shape)
        wanted = (*leading, -(-rows // BLOCK), -(-columns // BLOCK))
        if codes.dtype is not torch.float8_e4m3fn or scales.shape != wanted:
            what = f"{self.path}: the scales of {name} are {scales.shape}; {wanted} is one for each 128 x 128 values."
            self._tell(what, "Use a folder whose FP8 weights have such blocks.")
        else:
            yield name, Fp8(codes, scales)

    def _mxfp4(self, name: str, codes: Plain, found: Mapping[str, Plain]) -> Iterable[tuple[str, Stored]]:
        scales = found.get(f"{name}_scales")
        if scales is None or len(codes.shape) != 4 or codes.shape[3] != 16 or scales.shape != codes.shape[:3]:
            what = f"{self.path}: {name}_blocks {codes.shape} has no {name}_scales of its first three dimensions."
            self._tell(what, "Download the folder again.")
        else:
            yield name, Mxfp4(codes, scales)
