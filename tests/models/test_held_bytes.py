"""A converter holds one tensor at a time: an expert's matrix, or the largest tensor that is not stacked."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from coded_folders import nvfp4 as matrix_in_nvfp4
from command_here import moefw_says
from hf_models import MODELS, SIZES, tensors_of, theirs
from moefw.models.huggingface.folder import Folder
from moefw.models.huggingface.origins import Origin
from pairwise import each_value

EXPERT = 4 * 256 * 128
"""Bytes of an expert's matrix in fp32, the largest tensor of all models here that is not stacked."""
WIDE = {"hidden_size": 256, "head_dim": 16, "vocab_size": 62}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "qwen3_moe": {"moe_intermediate_size": 128},
    "gpt_oss": {"intermediate_size": 128},
}


class Held(TorchDispatchMode):
    """Counts the bytes of storages of the host that are alive, but for mapped files, whose pages are not held."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._seen = weakref.WeakSet[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu":
                self._see(tensor.untyped_storage())
        return out

    def _see(self, storage: torch.UntypedStorage) -> None:
        if storage in self._seen or is_of_a_file(storage.data_ptr()):
            return
        self._seen.add(storage)
        self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._freed, storage.nbytes())

    def _freed(self, nbytes: int) -> None:
        self.now -= nbytes


def is_of_a_file(address: int) -> bool:
    """Return whether memory at an address is that of a mapped safetensors file. Reading all maps takes a millisecond."""
    if any(is_in(address, span) and Path(f"/proc/self/map_files/{span}").is_symlink() for span in SPANS):
        return True
    lines = Path("/proc/self/maps").read_text().splitlines()
    SPANS[:] = [line.split()[0] for line in lines if line.endswith(".safetensors")]
    return any(is_in(address, span) for span in SPANS)


def is_in(address: int, span: str) -> bool:
    begin, end = (int(number, 16) for number in span.split("-"))
    return begin <= address < end


SPANS: list[str] = []
"""Addresses of the files that were mapped when the maps were last read."""


def held(*command: object) -> int:
    """Return the most bytes that a command holds."""
    with Held() as counted:
        moefw_says("convert", *command)
    return counted.most


def test_what_is_held_is_counted_and_what_is_freed_is_not() -> None:
    with Held() as counted:
        kept = torch.zeros(10)
        for _ in range(3):
            kept.add(1.0)
    assert counted.most == 2 * kept.nbytes


@pytest.mark.parametrize(("family", "stacked"), each_value(FAMILIES, [False, True]))
def test_import_and_export_hold_an_experts_matrix(family: str, stacked: bool, tmp_path: Path) -> None:
    model = theirs(family, {**SIZES, **MODELS[family], **WIDE, **FAMILIES[family]}).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "in", save_original_format=not stacked)
    assert sum(tensor.numel() for tensor in tensors_of(tmp_path / "in").values()) * 4 > 40 * EXPERT
    assert held("import", tmp_path / "in", tmp_path / "run") <= 1.1 * EXPERT
    assert held("export", tmp_path / "run", tmp_path / "out") <= 1.1 * EXPERT


def test_upcycling_holds_a_dense_matrix(tmp_path: Path) -> None:
    own = {key: value for key, value in SIZES.items() if key != "num_experts_per_tok"}
    theirs("qwen3", {**own, **WIDE, "intermediate_size": 128}).save_pretrained(tmp_path / "in")
    how = ["--experts=16", "--top-k=4", "--granularity=2"]
    assert held("upcycle", tmp_path / "in", tmp_path / "run", *how) <= 1.1 * EXPERT


def fp8() -> dict[str, Tensor]:
    return {"w": torch.zeros(1024, 1024).to(torch.float8_e4m3fn), "w_scale_inv": torch.ones(8, 8)}


def mxfp4() -> dict[str, Tensor]:
    codes = torch.zeros(4, 1024, 32, 16, dtype=torch.uint8)
    return {"w_blocks": codes, "w_scales": torch.full((4, 1024, 32), 127, dtype=torch.uint8)}


def nvfp4() -> dict[str, Tensor]:
    parts = matrix_in_nvfp4(1024, 1024, torch.Generator())
    return {f"w.weight{end}": part for end, part in parts.items()}


@pytest.mark.parametrize("codes", [fp8, mxfp4, nvfp4])
def test_codes_become_values_without_a_second_matrix(codes: Callable[[], dict[str, Tensor]], tmp_path: Path) -> None:
    save_file(codes(), tmp_path / "model.safetensors")
    folder = Folder(tmp_path)
    with Held() as counted:
        ((name, stored),) = folder.tensors.items()
        values = folder.read(Origin(name, (1,) if len(stored.shape) == 3 else ()))
    assert values.shape == (1024, 1024)
    assert counted.most <= 1.1 * 4 * values.numel()
