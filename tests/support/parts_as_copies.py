"""``benchmarks/on_gpu.py``. Its first part starts as it would there.

The others, and the runs that they start, are copies of a warm process.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import on_gpu  # noqa: E402
from copies import Copy  # noqa: E402


class Part(Copy):
    """A part, with what ``on_gpu`` asks of ``subprocess.Popen``."""

    def __init__(
        self, command: Sequence[str], *, cwd: Path, env: Mapping[str, str], stdout: IO[str], **_: object
    ) -> None:
        script = ["started_as_copies", Path(command[1]).stem]
        words = command[2:] if command[1] == "-m" else [*script, *command[2:]]
        super().__init__(words, cwd=cwd, env={**env, "PYTHONPATH": f"{BENCHMARKS}{os.pathsep}{env['PYTHONPATH']}"})
        self._file = stdout

    def wait(self, timeout: float) -> None:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        self._file.write("".join(self.communicate(0)))


def main() -> int:
    starts = itertools.chain([subprocess.Popen], itertools.repeat(Part))
    popen = {"Popen": lambda *command, **how: next(starts)(*command, **how)}
    on_gpu.subprocess = SimpleNamespace(**vars(subprocess) | popen)  # type: ignore[assignment]
    return on_gpu.main()


if __name__ == "__main__":
    sys.exit(main())
