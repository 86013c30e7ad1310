"""The tensors of a Hugging Face folder: files are checked before a value is read, codes become bf16 piece by piece."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final, final

import torch
from attrs import evolve
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed import ProcessGroup

from moefw.core.errors import CheckpointError, Problem
from moefw.models.huggingface.origins import Origin
from moefw.models.huggingface.stored import Coded, Fp8, Mxfp4, Nvfp4, Plain, Stored, coded_piece
from moefw.runtime import safetensors_dtypes as dtypes
from moefw.runtime.compute.code_formats import FP8, NVFP4, CodeFormat
from moefw.runtime.compute.coded_weight import CodedWeight
from moefw.runtime.finite import all_finite
from moefw.system.untrusted_files import read_regular

INDEX: Final = "model.safetensors.index.json"
MAX_INDEX_BYTES: Final = 1 << 28
"""256 MiB. An index has about a hundred bytes for each tensor, and that of Kimi-K2 less than 32 MiB."""
PICKLES: Final = (".bin", ".pt", ".pth", ".ckpt")
DTYPES: Final[Mapping[str, torch.dtype]] = {
    name: dtypes.DTYPES[name] for name in ("F64", "F32", "F16", "BF16", "F8_E4M3", "U8")
}
"""The dtypes of weights, of their codes and scales."""
SCALES: Final = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of FP8's scales. Others, such as bytes, hold exponents."""


def _first(origin: Origin) -> tuple[int | None, Origin]:
    """Index along the first dimension of a tensor that a parameter is cut from, and its place there; None: all."""
    if origin.cut and isinstance(origin.cut[0], int):
        return origin.cut[0], evolve(origin, cut=origin.cut[1:])
    return None, origin


def _not_finite(what: str) -> CheckpointError:
    return CheckpointError(what, "Download it again, or use other weights: nothing can be computed with these.")


class Folder:
    """The tensors of a folder by name. Raises CheckpointError with all that is wrong with its index and files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._problems: list[Problem] = []
        plain_tensors: dict[str, Plain] = {}
        places: dict[str, Path] = {}
        for file, names in self._files().items():
            here = self._opened(file, names)
            self._tell_twice(file, here, places)
            plain_tensors |= here
            places |= dict.fromkeys(here, file)
        tensors: dict[str, Stored] = {}
        for name, stored in self._decoded(plain_tensors):
            if name in tensors:
                self._tell(f"{path} holds {name} twice: {_twice(name, stored, tensors[name])}.", "Remove one.")
            tensors[name] = stored
        self.tensors: Mapping[str, Stored] = tensors
        if self._problems:
            raise CheckpointError(self._problems)

    @contextmanager
    def reading(self, group: ProcessGroup | None = None) -> Iterator[Reading]:
        """Yield what reads parameters, and looks at their values. Collective at exit.

        Raises CheckpointError at exit with all tensors that hold NaN or infinity, whichever rank of ``group`` has read
        them.
        """
        with all_finite(self.path, _not_finite, group) as looked_at:
            yield Reading(self, looked_at)

    def read(self, origin: Origin) -> Tensor:
        """Values of a parameter as they are, those of F64 in fp32, which parameters have.

        Only their bytes are read, and those of their own expert.
        """
        first, piece = _first(origin)
        values: Tensor = piece.of(self.tensors[origin.name].read(first))
        return values.float() if values.dtype is torch.float64 else values

    def read_codes(self, origin: Origin) -> CodedWeight:
        """Codes and scales of a parameter. Only their bytes are read, and those of their own expert."""
        stored = self._coded(origin)
        first, piece = _first(origin)
        return coded_piece(stored, (tensor.read(first) for tensor in stored.tensors), piece)

    def codes_without_bytes(self, origin: Origin) -> CodedWeight:
        """Codes and scales of a parameter on ``meta``. Raises ContractError for a piece that cuts a block."""
        stored = self._coded(origin)
        return coded_piece(stored, (tensor.without_bytes() for tensor in stored.tensors), origin)

    def format(self, origin: Origin) -> CodeFormat | None:
        """Format of a parameter that is stored as codes; None: it is stored as values."""
        stored = self.tensors[origin.name]
        return stored.format if isinstance(stored, Coded) else None

    def _coded(self, origin: Origin) -> Coded:
        stored = self.tensors[origin.name]
        assert isinstance(stored, Coded), "format() has said that these are codes"
        return stored

    def input_scale(self, origin: Origin) -> Tensor | None:
        """Scale of the rows that a weight in NVFP4 multiplies; None: the folder has none."""
        stored = self.tensors[origin.name]
        return stored.input_scale.read(None) if isinstance(stored, Nvfp4) and stored.input_scale else None

    def shape(self, origin: Origin) -> tuple[int, ...] | None:
        """Shape of a parameter; None if the tensor has no such piece."""
        try:
            return tuple(origin.of(torch.empty(self.tensors[origin.name].shape, device="meta")).shape)
        except (IndexError, RuntimeError):
            return None

    def _tell(self, what: str, fix: str) -> None:
        self._problems.append(Problem(what, fix))

    def _files(self) -> dict[Path, frozenset[str] | None]:
        """Files, each with the tensors that the index places in it; None: there is no index."""
        index = self.path / INDEX
        if os.path.lexists(index):
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
            content = read_regular(index, max_bytes=MAX_INDEX_BYTES)
        except OSError as error:
            self._tell(f"{index} cannot be read: {error.strerror}.", "Download it again.")
            return {}
        try:
            places = json.loads(content)["weight_map"]
            known = all(isinstance(name, str) and isinstance(file, str) for name, file in places.items())
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            known = False
            places = {}
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
        """Tensors of a file, whose header must describe the file's bytes, and be as the index says."""
        if not path.is_file():
            self._tell(f"{path} is {'no regular file' if path.exists() else 'missing'}.", "Download it.")
            return {}
        try:
            file = safe_open(path, "pt")
            here = frozenset(file.keys())
        except (SafetensorError, OSError, RuntimeError) as error:
            self._tell(f"{path} is no whole safetensors file: {error}.", "Download it again.")
            return {}
        tensors = {}
        for name in sorted(here):
            lazy = file.get_slice(name)
            if lazy.get_dtype() not in DTYPES:
                self._tell(f"{path}: {name} is {lazy.get_dtype()}, which no weight is.", "Download it again.")
            else:
                tensors[name] = Plain(lazy, tuple(lazy.get_shape()), DTYPES[lazy.get_dtype()])
        if names is not None:
            for name in sorted(here ^ names):
                where = "the index does not place it there" if name in here else "the file lacks it"
                self._tell(f"{path}: {name} is misplaced: {where}.", "Download file and index again.")
        return tensors

    def _tell_twice(self, file: Path, here: Mapping[str, Plain], places: Mapping[str, Path]) -> None:
        """Report the tensors of a file that files before it hold, too. With an index, no file may."""
        for other in sorted({places[name] for name in here.keys() & places.keys()}):
            both = sorted(name for name in here if places.get(name) == other)
            more = f" and {len(both) - 1} more" if len(both) > 1 else ""
            what = f"{other} and {file.name} both hold {both[0]}{more}, and no index says which one counts."
            self._tell(what, f"Remove the file that is not the model's, or add {INDEX}.")

    def _decoded(self, tensors: Mapping[str, Plain]) -> Iterable[tuple[str, Stored]]:
        """Yield every tensor by the name of its values."""
        for name, plain in tensors.items():
            scales = tensors.get(f"{name}_scale_inv")
            if name.endswith("_scale_inv") and name.removesuffix("_scale_inv") in tensors:
                continue
            if name.endswith("_scales") and f"{name.removesuffix('_scales')}_blocks" in tensors:
                continue
            if _belongs_to_nvfp4(name, tensors):
                continue
            if scales is not None:
                yield from self._fp8(name, plain, scales)
            elif plain.dtype is torch.float8_e4m3fn and name.endswith(".weight_scale"):
                packed = f"{name.removesuffix('_scale')}_packed"
                self._tell(f"{self.path}: {name} is FP8 and has no codes {packed}.", "Download the folder again.")
            elif plain.dtype is torch.float8_e4m3fn:
                self._tell(f"{self.path}: {name} is FP8 and has no {name}_scale_inv.", "Download the folder again.")
            elif name.endswith(".weight_packed"):
                yield from self._nvfp4(name.removesuffix("_packed"), plain, tensors)
            elif name.endswith("_blocks"):
                yield from self._mxfp4(name.removesuffix("_blocks"), plain, tensors)
            elif plain.dtype is torch.uint8:
                fix = "Use a folder in bf16, FP8, MXFP4, or NVFP4 of compressed-tensors."
                self._tell(f"{self.path}: {name} is packed in an unknown way.", fix)
            else:
                yield name, plain

    def _fp8(self, name: str, codes: Plain, scales: Plain) -> Iterable[tuple[str, Stored]]:
        if codes.dtype is not torch.float8_e4m3fn or len(codes.shape) not in (2, 3):
            what = f"{self.path}: {name} has scales, and is {codes.dtype} of shape {codes.shape}."
            self._tell(what, "Use a folder whose FP8 weights are E4M3 of two dimensions, or of three if stacked.")
            return
        shape = FP8.shape_of_scales(codes.shape)
        if scales.shape != shape or scales.dtype not in SCALES:
            what = f"{self.path}: the scales of {name} are {scales.dtype} of shape {scales.shape}."
            fix = f"Use a folder with one scale in fp32, bf16 or fp16 for each 128 x 128 values: {shape}."
            self._tell(what, fix)
        else:
            yield name, Fp8(codes, scales)

    def _mxfp4(self, name: str, codes: Plain, tensors: Mapping[str, Plain]) -> Iterable[tuple[str, Stored]]:
        scales = tensors.get(f"{name}_scales")
        if scales is None or len(codes.shape) != 4 or codes.shape[3] != 16 or scales.shape != codes.shape[:3]:
            what = f"{self.path}: {name}_blocks {codes.shape} has no {name}_scales of its first three dimensions."
            self._tell(what, "Download the folder again.")
        elif codes.dtype is not torch.uint8 or scales.dtype is not torch.uint8:
            what = f"{self.path}: {name}_blocks and {name}_scales are {codes.dtype} and {scales.dtype}."
            self._tell(what, "Use a folder whose MXFP4 weights are in bytes (U8).")
        else:
            yield name, Mxfp4(codes, scales)

    def _nvfp4(self, name: str, codes: Plain, tensors: Mapping[str, Plain]) -> Iterable[tuple[str, Stored]]:
        scales, divisor = tensors.get(f"{name}_scale"), tensors.get(f"{name}_global_scale")
        if scales is None or divisor is None:
            lacks = [own for own in (f"{name}_scale", f"{name}_global_scale") if own not in tensors]
            what = f"{self.path}: {name}_packed has no {' and no '.join(lacks)}."
            self._tell(what, "Use a folder in NVFP4 (nvfp4-pack-quantized), or download it again.")
            return
        if codes.dtype is not torch.uint8 or len(codes.shape) != 2:
            what = f"{self.path}: {name}_packed is {codes.dtype} of shape {codes.shape}."
            self._tell(what, "Use a folder whose NVFP4 weights are matrices of bytes (U8), each expert's of its own.")
            return
        out_dim, pairs = codes.shape
        shape = NVFP4.shape_of_scales((out_dim, 2 * pairs))
        if 2 * pairs % NVFP4.columns or scales.shape != shape or scales.dtype is not NVFP4.scale_dtype:
            what = f"{self.path}: {name}_scale is {scales.dtype} of shape {scales.shape}, and its codes {codes.shape}."
            self._tell(what, "Use a folder with one scale in E4M3 for each 16 values of a row.")
        elif divisor.shape != (1,) or divisor.dtype is not NVFP4.divisor_dtype:
            what = f"{self.path}: {name}_global_scale is {divisor.dtype} of shape {divisor.shape}."
            self._tell(what, "Use a folder with one number in fp32 for each weight, of shape (1,).")
        else:
            yield name, Nvfp4(codes, scales, divisor, tensors.get(Nvfp4.name_of_input_scale(name)))


def _belongs_to_nvfp4(name: str, tensors: Mapping[str, Plain]) -> bool:
    """Whether a tensor belongs to codes in NVFP4: their scales, or that of inputs, which no recipe of ours reads."""
    owner, _, leaf = name.rpartition(".")
    return leaf in ("weight_scale", "weight_global_scale", "input_global_scale") and f"{owner}.weight_packed" in tensors


def _twice(name: str, *stored: Stored) -> str:
    """How a tensor is stored twice."""
    coded = (each for each in stored if isinstance(each, Coded))
    return f"{' and '.join(f'in {each.format.name}, as {each.names(name)[0]}' for each in coded)}, and as it is"


@final
class Reading:
    """Reads parameters of a folder, and looks at their values. Called with an origin, it returns values."""

    def __init__(self, folder: Folder, looked_at: Callable[[str, Tensor], Tensor]) -> None:
        self._folder = folder
        self._looked_at = looked_at

    def __call__(self, origin: Origin) -> Tensor:
        """Values of a parameter."""
        return self._looked_at(origin.name, self._folder.read(origin))

    def codes(self, origin: Origin) -> CodedWeight:
        """Codes and scales of a parameter, whose values are looked at, too."""
        coded = self._folder.read_codes(origin)
        self._looked_at(origin.name, coded.values())
        return coded
