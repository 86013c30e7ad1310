"""The tiles of experts: those of a table that was measured on this GPU with this Triton, else untuned ones."""

from __future__ import annotations

import warnings

import torch
import triton

from moefw.core.errors import PlanError
from moefw.plugins.gemm.triton.table import read
from moefw_kernels.devices import is_gpu
from moefw_kernels.expert_gemm import CANDIDATES, UNTUNED, Tile, Tiles


def chosen_tiles(path: str | None, device: torch.device) -> Tiles:
    """Tiles of a table in a file; ``UNTUNED`` without one, on a CPU, and for one of another GPU or Triton.

    A table of others is ignored with a warning. Raises PlanError for a tile that is none of ``CANDIDATES``.
    """
    if path is None or not is_gpu(device):
        return UNTUNED
    table = read(path)
    here = torch.cuda.get_device_name(device), triton.__version__
    if (table.gpu, table.triton) != here:
        measured = f"{path} has tiles for {table.gpu} and Triton {table.triton}; here are {here[0]} and {here[1]}"
        warnings.warn(f"gemm triton: {measured}. They are ignored: tiles are not tuned.", stacklevel=2)
        return UNTUNED
    tiles = {name: Tile(*numbers) for name, numbers in table.tiles.items()}
    unknown = [f"{name} {list(tile)}" for name, tile in tiles.items() if tile not in CANDIDATES[name]]
    if unknown:
        what = f"gemm triton: {path} has tiles that moefw does not have: {', '.join(unknown)}."
        raise PlanError(what, "Measure again: moefw bench tiles.")
    return Tiles(**tiles)
