"""A table of tiles: ``moefw bench tiles`` measures and writes it, ``gemm: {use: triton, tiles: FILE}`` reads it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from attrs import asdict, frozen

from moefw.core.errors import PlanError, os_reason

PRODUCTS: Final = ("gated", "down", "gated_backward", "dgrad")
"""The products of experts, each of which has a tile."""
_FIX: Final = "Write it with: moefw bench tiles SPEC --out FILE. Or leave gemm.tiles out."


@frozen(kw_only=True)
class Table:
    """The fastest tiles of products of one size, on the GPU and with the Triton that are named."""

    gpu: str
    triton: str
    sizes: Mapping[str, int]
    tiles: Mapping[str, tuple[int, ...]]
    """Of each product: columns, depth, warps and stages."""
    microseconds: Mapping[str, Mapping[str, float]]
    """Of each product, by tile; those whose values are wrong are left out."""


def read(path: str) -> Table:
    """Table in a file. Raises PlanError with the reason if there is none."""
    try:
        return _table(json.loads(Path(path).read_text()))
    except OSError as error:
        reason = os_reason(error)
    except (ValueError, KeyError, TypeError) as error:
        reason = f"it is no table of tiles ({error})"
    raise PlanError(f"gemm triton cannot read tiles from {path}: {reason}.", _FIX)


def write(table: Table, path: str) -> None:
    """Write the table to a file."""
    Path(path).write_text(json.dumps(asdict(table, recurse=False), indent=1) + "\n")


def _table(found: Mapping[str, Any]) -> Table:
    tiles = {name: tuple(map(int, found["tiles"][name])) for name in PRODUCTS}
    if any(len(tile) != 4 for tile in tiles.values()):
        raise ValueError("a tile has columns, depth, warps and stages")
    return Table(
        gpu=str(found["gpu"]),
        triton=str(found["triton"]),
        sizes=found["sizes"],
        tiles=tiles,
        microseconds=found["microseconds"],
    )
