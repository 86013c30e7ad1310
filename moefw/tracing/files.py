"""The files of a trace: those that ranks write, and those that are made of them when the run has ended."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from attrs import frozen

from moefw.system.files import replaced_file
from moefw.tracing.picture import draw, rows_of_trace
from moefw.tracing.rank_file import PATTERN, RankTrace, read_ranks
from moefw.tracing.shares import mean, shares_of
from moefw.tracing.whole import aligned, events

SUFFIX: Final = ".json"
MADE_BY: Final = "moefw"


@frozen
class TraceFiles:
    """The file of a trace, which ends in ``.json``, and those beside it that have its name."""

    whole: Path

    @property
    def spans(self) -> Path:
        """Folder of what each rank writes."""
        return self.whole.with_suffix(".spans")

    @property
    def operators(self) -> Path:
        """Folder of the operators of each rank, which PyTorch's profiler writes."""
        return self.whole.with_suffix(".operators")

    @property
    def memory(self) -> Path:
        """Folder of a snapshot of each GPU's memory."""
        return self.whole.with_suffix(".memory")

    @property
    def picture(self) -> Path:
        """Picture of all ranks."""
        return self.whole.with_suffix(".png")

    @property
    def shares(self) -> Path:
        """Shares of the time of each rank, and of all."""
        return self.whole.with_suffix(".shares.json")

    @property
    def folders(self) -> Mapping[Path, str]:
        """Folders of files of ranks, and the pattern of their names."""
        return {self.spans: PATTERN, self.operators: "rank-*.json", self.memory: "rank-*.pickle"}

    def clear(self) -> None:
        """Remove the files of an earlier trace. Raises OSError."""
        for folder, pattern in self.folders.items():
            for path in folder.glob(pattern):
                path.unlink()
        for path in (self.whole, self.picture, self.shares):
            path.unlink(missing_ok=True)

    def finish(self) -> list[RankTrace]:
        """Make one file, the picture and the shares of what ranks have written, and return it on one clock.

        Nothing is made if no rank has traced a step. Raises OSError.
        """
        ranks = aligned([rank for rank in read_ranks(self.spans) if rank.spans])
        if not ranks:
            return []
        data = {"displayTimeUnit": "ms", "otherData": {"made_by": MADE_BY}, "traceEvents": [*events(ranks)]}
        with replaced_file(self.whole) as scratch, scratch.open("w") as file:
            json.dump(data, file)
        shares = shares_of(ranks)
        of_all = mean([*shares.values()])
        steps = sorted({span.step for rank in ranks for span in rank.spans})
        told: dict[str, Any] = {
            "steps": steps,
            "mean": of_all.to_data(),
            "ranks": {rank: each.to_data() for rank, each in shares.items()},
        }
        with replaced_file(self.shares) as scratch:
            scratch.write_text(f"{json.dumps(told, indent=2)}\n")
        title = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
        if of_all.hidden_communication is not None:
            title = f"{title}; compute hides {of_all.hidden_communication:.0%} of the communication"
        named = {f"rank {rank}": each for rank, each in shares.items()}
        draw(self.picture, rows_of_trace(ranks), named, title=title, time="ms")
        return ranks


def is_trace(path: Path) -> bool:
    """Whether a file is a trace that this module made. Raises OSError."""
    with path.open() as file:
        return f'"made_by": "{MADE_BY}"' in file.read(200)
