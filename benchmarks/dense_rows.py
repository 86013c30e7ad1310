"""Published step times of dense models beside predictions that nothing was fitted to: writes ``docs/time-dense.md``.

``python benchmarks/dense_rows.py > docs/time-dense.md``. The numbers are those that were fitted to MoE models alone.
``published/dense_rows.csv`` has the rows, each with its page, recipe and commit.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from attrs import frozen

import record
from closed_form import Sizes
from moefw.planner.time.scale import fitted
from published_rows import Predictor, Row
from step_times import Errors, Summary, errors, votes

ROWS: Final = Path(__file__).parent / "published" / "dense_rows.csv"
LLAMA: Final[Mapping[str, Mapping[str, int]]] = {
    "LLAMA3_8B": {"dim": 4096, "layers": 32, "dense_dim": 14336, "heads": 32},
    "LLAMA3_70B": {"dim": 8192, "layers": 80, "dense_dim": 28672, "heads": 64},
    "LLAMA3.1_405B": {"dim": 16384, "layers": 126, "dense_dim": 53248, "heads": 128},
}
"""Sizes by the Llama 3 report (arXiv 2407.21783, table 3); all have 8 heads of keys and values, of width 128."""
PRECISIONS: Final[Mapping[str, str]] = {
    "FP8": "fp8",
    "FP8-CS": "fp8",
    "FP8-MX": "mxfp8",
    "FP8-finegrained": "fp8block",
    "MXFP8": "mxfp8",
    "NVFP4": "nvfp4",
}
HEAD: Final = """# The time of a step of dense models

`python benchmarks/dense_rows.py > docs/time-dense.md` writes this page.

The numbers behind [the time of a step](time.md) were fitted to MoE models alone. Here they predict, unchanged, all rows
of dense models of Megatron-Bridge's performance pages ([`dense_rows.csv`](../benchmarks/published/dense_rows.csv)): how
well hardware is known without experts. No number is fitted to them. Once they showed what was wrong: H100 came out 20 %
too slow, so the sources of Hopper's products were read again. FP8 had been measured on a board of 500 W and was counted
as of 700 W. That is [corrected](time.md#changes-of-structure-since-the-first-fit), from other sources.

Rows are taken as those of MoE models are:

- embedding and head count as a layer each when layers are split into stages, although 80 layers divide evenly over 20
  stages;
- transfers of tensor parallelism are exposed, although these recipes overlap them with products;
- FSDP gathers weights and sums gradients in each micro-batch, beside what it computes, and what is recomputed or
  offloaded in some layers costs nothing;
- a row has CUDA graphs if its recipe names an implementation and a scope of them;
- software of 2025 has the factor that was fitted to other rows of 2025."""


@frozen(slots=False)
class DenseRow(Row):
    """A published row of a dense model."""

    @property
    def sizes(self) -> Sizes:
        """Sizes of the row's model."""
        sizes = LLAMA[self["model"]]
        return Sizes(
            dim=sizes["dim"],
            vocab=128256,
            layers=sizes["layers"],
            dense_layers=sizes["layers"],
            dense_dim=sizes["dense_dim"],
            experts=0,
            top_k=0,
            expert_dim=0,
            shared_dim=0,
            groups=1,
            top_groups=1,
            mtp=0,
            attention={"use": "gqa", "num_heads": sizes["heads"], "num_kv_heads": 8, "head_dim": 128},
        )


def main() -> None:
    """Print the page."""
    print("\n".join(lines(read())))


def read() -> Sequence[DenseRow]:
    """All rows."""
    with ROWS.open(newline="", encoding="utf-8") as file:
        return [DenseRow(_as_moe_row(number, fields)) for number, fields in enumerate(csv.DictReader(file))]


def _as_moe_row(number: int, fields: Mapping[str, str]) -> Mapping[str, str]:
    """Fields of a row under the names and with the values of ``moe_rows.csv``."""
    implementation, _, scopes = fields["cuda_graph"].partition(":")
    layout = [fields[name] for name in ("model", "system", "gpus", "precision", "tp", "pp", "cp", "vpp", "micro_batch")]
    return {
        **fields,
        "id": f"d{number:03}",
        "layout": " ".join(layout),
        "system": fields["system"].removeprefix("DGX-"),
        "precision": PRECISIONS[fields["precision"]],
        "stack": "mcore25" if fields["release"].startswith("25.") else "mcore26",
        "cuda_graph": "off" if implementation == "none" else scopes,
        "recompute": "none",
        "offload": "",
        "truth_tflops": fields["model_tflops_per_gpu"],
        "score": "yes",
    }


def lines(rows: Sequence[DenseRow]) -> Iterator[str]:
    """Yield the page's lines."""
    predictor = Predictor.empty()
    found = errors(rows, predictor, fitted())
    yield HEAD
    yield f"\nPredicted by the code of commit {record.commit()}."
    yield "\n## Errors\n"
    yield "In percent of the published figure; rows of one layout count together as one."
    yield "\n| rows | layouts | mean | median | 90 % within | worst | within 20 % |\n|---|---|---|---|---|---|---|"
    for name, belongs in groups().items():
        of_group = [row for row in rows if belongs(row)]
        sizes = votes(of_group, found)
        yield f"| {name}: {len(of_group)} | {len(sizes)} | {Summary.of(sizes)} |"
    yield from _all_rows(rows, found)


def groups() -> Mapping[str, Callable[[Row], bool]]:
    """Groups of rows by what they have in common."""
    return {
        "all": lambda row: True,
        "software of 2026": having("stack", "mcore26"),
        "software of 2025": having("stack", "mcore25"),
        **{model: having("model", model) for model in LLAMA},
        **{system: having("system", system) for system in ("H100", "B200", "GB200", "GB300")},
        **{precision: having("precision", precision) for precision in ("fp8", "fp8block", "mxfp8", "nvfp4")},
        "without tensor parallelism": having("tp", "1"),
        "with tensor parallelism": lambda row: row["tp"] != "1",
    }


def having(field: str, value: str) -> Callable[[Row], bool]:
    """Whether a row has a value in a field."""
    return lambda row: row[field] == value


def _all_rows(rows: Sequence[Row], found: Errors) -> Iterator[str]:
    yield "\n## Every row\n"
    settings = "tp pp cp chunks | micro-batch | graphs | fsdp | release"
    yield f"| row | model | GPUs | precision | {settings} | TFLOPS | predicted | error |\n|{'---|' * 12}"
    for row in rows:
        layout = " ".join(row[name] or "-" for name in ("tp", "pp", "cp", "vpp"))
        published = float(row["truth_tflops"])
        error = found[row["id"]]
        about = [row["id"], row["model"], f"{row['gpus']} {row['system']}", row["precision"], layout]
        about += [row["micro_batch"], row["cuda_graph"] or "-", row["fsdp"] or "-", row["release"]]
        yield f"| {' | '.join(about)} | {published:.0f} | {published * (1 + error):.0f} | {100 * error:+.1f} |"


if __name__ == "__main__":
    main()
