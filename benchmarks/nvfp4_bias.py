"""Bias and error of random rounding in NVFP4, by how the scales of blocks are rounded.

Each row of the table quantizes the same numbers many times with ``moefw_kernels.quantize.quantize_nvfp4``, in blocks of
1x16. ``block maxima`` is the mean of the largest number of a block over draws, over the number, minus one: the mean
over blocks. ``tensor`` is ``<mean of draws, x> / <x, x> - 1``: how much of a gradient is lost along its own direction.
``error`` is the norm of a draw's difference to x over the norm of x. Numbers are normally distributed; in "one large in
16" one number of each block is 64 times as large. Writes the table into ``docs/precision.md``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

import record
from moefw_kernels.quantize import BlockScales, quantize_nvfp4
from moefw_kernels.random import token_keys

PAGE: Final = Path(__file__).parents[1] / "docs" / "precision.md"
BEGIN: Final = "<!-- written by benchmarks/nvfp4_bias.py"
END: Final = "<!-- end of what benchmarks/nvfp4_bias.py writes -->"
SCALES: Final[tuple[BlockScales, ...]] = ("nearest", "up")


def normal(rows: int) -> Tensor:
    """Return normally distributed numbers, ``(rows, 256)``."""
    return torch.randn(rows, 256, generator=torch.Generator().manual_seed(0))


def one_large_in_16(rows: int) -> Tensor:
    """Return the same, the first number of each block 64 times as large."""
    x = normal(rows)
    x[:, ::16] *= 64
    return x


NUMBERS: Final[Mapping[str, Callable[[int], Tensor]]] = {"normal": normal, "one large in 16": one_large_in_16}


def measure(x: Tensor, scales: BlockScales, draws: int) -> dict[str, float]:
    """Return the biases and errors of ``x`` (R, C). ``draws`` 0: rounded to nearest."""
    total = torch.zeros_like(x, dtype=torch.float64)
    error = 0.0
    for draw in range(max(1, draws)):
        keys = token_keys(torch.tensor([draw]), torch.arange(len(x)), salt=1) if draws else None
        values = quantize_nvfp4(x, keys=keys, scales=scales).dequantize()
        total += values
        error += ((values - x).norm() / x.norm()).item() / max(1, draws)
    mean = total / max(1, draws)
    truth = x.double()
    at = truth.unflatten(-1, (-1, 16)).abs().argmax(-1, keepdim=True)
    largest, seen = (one.unflatten(-1, (-1, 16)).gather(-1, at) for one in (truth, mean))
    along = (mean * truth).sum() / truth.square().sum() - 1
    return {"block_maxima": (seen / largest - 1).mean().item(), "tensor": along.item(), "error": error}


def table(rows: list[dict[str, object]], commit: str) -> str:
    """Return the table in Markdown, with the command and commit that measured it."""
    lines = [
        f"{BEGIN}, commit {commit} -->",
        "",
        "| numbers | rounding | `scales` | block maxima | tensor | error |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        said = f"| {row['numbers']} | {row['rounding']} | `{row['scales']}` "
        lines.append(f"{said}| {row['block_maxima']:+.2%} | {row['tensor']:+.2%} | {row['error']:.1%} |")
    return "\n".join([*lines, "", END])


def main() -> None:
    """Measure, print the table, and write it and the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--draws", type=int, default=256)
    parser.add_argument("--dry-run", action="store_true", help="a few draws, which are no results")
    arguments = parser.parse_args()
    count, draws = (16, 4) if arguments.dry_run else (arguments.rows, arguments.draws)
    rows: list[dict[str, object]] = []
    for numbers, made in NUMBERS.items():
        for rounding, times in (("at random", draws), ("to nearest", 0)):
            for scales in SCALES:
                found = measure(made(count), scales, times)
                rows.append({"numbers": numbers, "rounding": rounding, "scales": scales, **found})
    text = table(rows, record.commit())
    print(text)
    record.write("nvfp4_bias", {"rows_of_256": count, "draws": draws, "measured": rows}, dry=arguments.dry_run)
    if not arguments.dry_run:
        page = PAGE.read_text()
        before, _, rest = page.partition(BEGIN)
        PAGE.write_text(before + text + rest.partition(END)[2])


if __name__ == "__main__":
    main()
