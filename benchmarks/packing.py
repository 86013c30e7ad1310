"""Dynamic against static context parallelism on documents whose lengths have a long tail.

First by arithmetic: steps of 64 ranks with the sizes of a layer of Qwen3-30B-A3B, their packs by the scheduler of
training. Then whole steps of a small model on four gloo ranks, whose losses are equal. Lengths are log-normal.
Results go to ``benchmarks/results/packing.json``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from attrs import evolve, frozen
from rich.console import Console
from rich.table import Table

import record
from moefw.core.site import Dims
from moefw.runtime.parallel.cp_blocks import block_sizes
from moefw.testing.pool import RankPool
from moefw.testing.training import SMALL, short_run
from moefw.training.data.packing.schedule import Pack, Room, schedule, token_work
from packed_text import read_packs

LONGEST = 32768
MEDIAN = 1024
SPREAD = 1.5
"""Tokens of the longest sequence and of the median one, and the deviation of their logarithms."""
DP = 8
CP = 8
STEPS = 16
MICRO_BATCHES = 4
QWEN3 = Dims(model_dim=2048, expert_dim=768, num_experts=128, top_k=8)
WAYS = ("static", "dynamic")


@frozen(kw_only=True)
class Cost:
    """Sums over steps; ``most_``: of the busiest rank of each micro-batch. Scores are those that queries see."""

    micro_batches: int = 0
    tokens: int = 0
    padded: int = 0
    most_tokens: float = 0.0
    most_scores: float = 0.0
    most_exchanged: float = 0.0
    fair_scores: float = 0.0

    def of(self, lengths: Sequence[int], room: Room) -> Cost:
        """Return the sums with one step more."""
        batches = [{(dp, pack) for dp, row in enumerate(rows) for pack in row} for rows in schedule(lengths, room)]
        padded = sum(held(pack, lengths, room) for batch in batches for _, pack in batch)

        def of_busiest(cost: Callable[[Pack], float]) -> float:
            return sum(max(cost(pack) for _, pack in batch) for batch in batches)

        return Cost(
            micro_batches=self.micro_batches + len(batches),
            tokens=self.tokens + sum(lengths),
            padded=self.padded + padded - sum(lengths),
            most_tokens=self.most_tokens + of_busiest(lambda pack: held(pack, lengths, room) / pack.size),
            most_scores=self.most_scores + of_busiest(lambda pack: scores(pack, lengths)),
            most_exchanged=self.most_exchanged + of_busiest(lambda pack: exchanged(pack, lengths)),
            fair_scores=self.fair_scores + sum(n * (n + 1) / 2 for n in lengths) / (room.dp * room.cp),
        )


def held(pack: Pack, lengths: Sequence[int], room: Room) -> int:
    """Return the tokens of a pack with its padding."""
    return sum(room.held([lengths[number] for number in pack.sequences], pack.size))


def scores(pack: Pack, lengths: Sequence[int]) -> float:
    """Return the scores of each of the ranks that share a pack: pieces from the front and the back are equal shares."""
    return sum(lengths[number] * (lengths[number] + 1) / 2 for number in pack.sequences) / pack.size


def exchanged(pack: Pack, lengths: Sequence[int]) -> float:
    """Return the tokens whose keys each rank gets from the others that share a pack."""
    return sum(lengths[number] for number in pack.sequences) * (pack.size - 1) / pack.size


def drawn(count: int, longest: int, median: int) -> list[int]:
    """Return log-normal lengths."""
    lengths = np.random.default_rng(0).lognormal(np.log(median), SPREAD, count)
    return np.clip(lengths, 2, longest).astype(int).tolist()


def steps(lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Yield the lengths of each step, up to ``tokens``."""
    step = list[int]()
    for length in lengths:
        if sum(step) + length > tokens:
            yield step
            step = []
        step.append(length)


def planned(dp: int, cp: int, count: int) -> dict[str, dict[str, float]]:
    """Return what each way costs, over a fair share of all tokens, and of their scores."""
    room = Room(dp=dp, cp=cp, tp=1, tokens=LONGEST // cp, sizes=(cp,), token_work=token_work(QWEN3))
    rooms = {"static": room, "dynamic": evolve(room, sizes=block_sizes(cp))}
    tokens = MICRO_BATCHES * dp * LONGEST
    found = {}
    for way, here in rooms.items():
        cost = Cost()
        done = 0
        for lengths in steps(drawn(10**6, LONGEST, MEDIAN), tokens):
            cost = cost.of(lengths, here)
            done = done + 1
            if done == count:
                break
        found[way] = {
            "micro-batches": cost.micro_batches,
            "padded tokens": round(cost.padded / cost.tokens, 5),
            "tokens of the busiest rank": round(cost.most_tokens * dp * cp / cost.tokens, 3),
            "attention FLOPs of the busiest rank": round(cost.most_scores / cost.fair_scores, 3),
            "tokens exchanged by the busiest rank": round(cost.most_exchanged * dp * cp / cost.tokens, 3),
        }
    return found


def run(count: int) -> dict[str, dict[str, float]]:
    """Return loss and seconds of a step on four ranks. Raises AssertionError if the losses are not equal."""
    train = {**SMALL["train"], "seq_len": 1024, "micro_batch": 1, "tokens_per_step": 4096}
    pool = RankPool(4)
    found = dict[str, dict[str, float]]()
    for way in WAYS:
        spec = {**SMALL, "train": {**train, "packing": way}, "parallel": {"dense": {"cp": 4}, "experts": {"ep": 4}}}
        read = partial(read_packs, lengths=drawn(2000, 1024, 48))
        seconds = list[float]()
        for number in (1, 1, 1 + count):
            begun = time.perf_counter()
            (made, *_) = pool.run(short_run, 4, spec, number, False, False, read)
            seconds.append(time.perf_counter() - begun)
        found[way] = {"loss": made.results[-1].loss, "seconds a step": round((seconds[2] - seconds[1]) / count, 3)}
    pool.close()
    static, dynamic = (found[way]["loss"] for way in WAYS)
    assert abs(static / dynamic - 1) < 1e-5, found
    return found


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of the arithmetic")
    parser.add_argument("--measured", type=int, default=4, help="measured steps")
    options = parser.parse_args()
    found: dict[str, Any] = {f"{DP} dp x {CP} cp": planned(DP, CP, options.steps), "4 ranks": run(options.measured)}
    for title, ways in found.items():
        table = Table("", *WAYS, title=title)
        for row in ways["static"]:
            table.add_row(row, *(str(ways[way][row]) for way in WAYS))
        Console().print(table)
    print(record.write("packing", {"longest": LONGEST, "median": MEDIAN, "spread": SPREAD, **found}))


if __name__ == "__main__":
    main()
