"""How fast this machine is at a moment: processor time of one fixed piece of work, of as many ranks at once as train.

Virtual machines share processors with others, whose work slows them and lets them go: within minutes a step may take a
third more. Beside this pace, errors of a prediction are those of the prediction.

    python benchmarks/pace.py [--ranks 2] [--times 5]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import mean, median
from typing import IO, Final, final

from moefw.system.python import python

STEPS: Final = 16
"""Steps of a small model that are the work: half a second, about, of Python, of small products and of passes."""


@final
class Pace:
    """Processes that wait, idle, until they are asked how fast the machine is."""

    def __init__(self, asked: Sequence[IO[str]], answers: Sequence[IO[str]]) -> None:
        self._asked = asked
        self._answers = answers

    def work_s(self) -> float:
        """Seconds of a processor that the work takes now, the mean of all ranks, which work at once."""
        for pipe in self._asked:
            pipe.write("work\n")
            pipe.flush()
        return mean(float(pipe.readline()) for pipe in self._answers)


@contextmanager
def paced(ranks: int) -> Iterator[Pace]:
    """Context with the processes of so many ranks, ready to work."""
    command = [*python(str(Path(__file__).resolve())), "--work"]
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                )
            )
            for _ in range(ranks)
        ]
        asked, answers = [], []
        for process in processes:
            assert process.stdin is not None
            assert process.stdout is not None
            asked.append(process.stdin)
            answers.append(process.stdout)
        pace = Pace(asked, answers)
        pace.work_s()  # the first call imports, and takes memory
        yield pace


def work_when_asked() -> None:
    """Answer each line of the standard input with the seconds that the work took."""
    import torch

    from moefw.training.checked_steps import TREE
    from moefw.training.small_steps import Steps, small_assembly

    device = torch.device("cpu")
    with ExitStack() as stack:
        steps = Steps(small_assembly(TREE, device, 1), device, stack)
        for _ in sys.stdin:
            print(sum(sum(steps.seconds(time.thread_time)) for _ in range(STEPS)), flush=True)


def main() -> None:
    """Print the pace of some moments, a second apart."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work_when_asked()
        return
    with paced(arguments.ranks) as pace:
        seconds = []
        for _ in range(arguments.times):
            seconds.append(pace.work_s())
            print(f"{seconds[-1]:.3f} s of a processor")
            time.sleep(1)
    print(f"{max(seconds) / min(seconds) - 1:.0%} from the fastest to the slowest; median {median(seconds):.3f} s")


if __name__ == "__main__":
    main()
