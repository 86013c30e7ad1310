"""What QK-Clip costs: CPU seconds of the largest logits beside those of the attention core, forward and backward.

One sequence, 8 heads of queries that share 2 of keys, of 64 values, on one thread; the least of some repeats. A step
has projections and experts besides.

Results go to ``benchmarks/results/qk_clip.json``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Final

import torch

import record
from moefw.compose.build import open_layout
from moefw.runtime.attention.attend import attend
from moefw.runtime.attention.largest_logits import largest_logits
from moefw.runtime.attention.mask import Mask
from moefw.runtime.parallel.sequence_cut import SequenceCut
from moefw.testing.layer_case import LayerCase

LENGTHS: Final = (512, 2048, 8192)
REPEATS: Final = 5


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry", action="store_true", help="short sequences once, to see that it runs")
    dry = parser.parse_args().dry
    torch.set_num_threads(1)
    rows = [measure(length, 1 if dry else REPEATS) for length in ((64,) if dry else LENGTHS)]
    print(f"{'positions':>9} {'forward':>9} {'backward':>9} {'measuring':>9} {'share':>6}")
    for row in rows:
        times = " ".join(f"{row[name]:9.4f}" for name in ("forward_s", "backward_s", "measuring_s"))
        print(f"{row['positions']:>9} {times} {row['share']:6.0%}")
    print(record.write("qk_clip", {"rows": rows}, dry=dry))


def measure(positions: int, repeats: int) -> dict[str, float]:
    """Return CPU seconds, and those of measuring as a share of forward and backward."""
    draws = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, positions, 64, generator=draws).requires_grad_() for heads in (8, 2, 2))
    alone = SequenceCut(open_layout(LayerCase().resolve(), "cpu"))
    forward_s = least(lambda: attend(q, k, v, Mask()), repeats)

    def both() -> None:
        out, _ = attend(q, k, v, Mask())
        out.sum().backward()

    both_s = least(both, repeats)
    with torch.no_grad():
        measuring_s = least(lambda: largest_logits(q, k, Mask(), alone, scale=None), repeats)
    return {
        "positions": positions,
        "forward_s": forward_s,
        "backward_s": both_s - forward_s,
        "measuring_s": measuring_s,
        "share": measuring_s / both_s,
    }


def least(function: Callable[[], object], repeats: int) -> float:
    """Return the least CPU seconds of a call."""
    seconds = []
    for _ in range(repeats):
        began = time.process_time()
        function()
        seconds.append(time.process_time() - began)
    return min(seconds)


if __name__ == "__main__":
    main()
