"""Searches around published layouts: whether they find what vendors found. Writes ``docs/tune-published.md``.

``python benchmarks/tune.py [--rows ID ...] > docs/tune-published.md`` searches around the best published rows of three
models in the software of the row, records each row under ``results/tune.json``, and prints the page of all that are
recorded there. ``--rows`` without an ID searches nothing.

Rows are searched in the specs of :mod:`published_specs`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import record
from moefw.compose.spec.structure import plain
from published_rows import Row, read
from published_specs import spec_of

ROWS: Final = ("p018", "p019", "p109", "p015", "p142")
"""Best rows of DeepSeek-V3 on 256 GB300, at two batches, and on 1,024 H100, of Qwen3-235B, and of Kimi-K2."""
KEPT: Final = {"automodel": ("schedule", "tp", "etp", "memory", "dispatcher")}
"""What a search keeps of rows of a stack, beside sharding: the software has nothing else there, or it is not known.

Of AutoModel: its MoE models refuse tensor parallelism, shard experts by ``ep`` and FSDP alone, and recompute whole
blocks or none, by the parallelizer of the row's recipe (``nemo_automodel/components/moe/parallelizer.py`` at 4448734);
which other schedules it has is not known here. What Megatron has, its implementation's file says.
"""
ALLOWED: Final = 3.0
"""Percent below the tied group that a vendor's layout may be predicted, by the issue's goal."""
CATEGORIES: Final = 3
"""Categories of time that are named for a difference."""
GIB: Final = 2**30
HEAD: Final = f"""# What vendors found, and what a search finds

`python benchmarks/tune.py > docs/tune-published.md` writes this page.

[`moefw tune`](tune.md) around the best published rows of three models, in the software of the row (`--as`): with its
kernels, with graphs as in the row, and of schedules and dispatchers with those alone that it has. AutoModel has no
tensor parallelism for MoE models or inside of experts, and recomputes whole blocks or none, so its row keeps these,
its schedule and its dispatcher. Parameters stay sharded as in the row, by a distributed optimizer, which is ZeRO 1:
no run with ZeRO 2 or 3 was published with which a prediction could be checked. What a search finds that varies it,
too, is said beside. A published layout is found if it fits and is tied with the best that the search finds, or at
most {ALLOWED:.0f} % below the tied group.

The best is the first of the tied group: of what the error of a ratio cannot tell apart, that with most memory left.
So it may be a little slower than the published layout. Both times of a row are predictions. The error bar of the best
is that of [one prediction](time.md); ties are by the error of a ratio. States, gradients and recompute are those of the
row's recipe, where its page does not say them ([`recipes.csv`](../benchmarks/published/recipes.csv)). moefw keeps fp32
masters in any case, and counts [memory that is not for tensors](clusters.md#memory-that-is-not-for-tensors).
"""
Found = Mapping[str, Any]


def main() -> None:
    """Search around rows, record them, and print the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--candidates", type=int, default=300)
    parser.add_argument("--rows", nargs="*", default=ROWS, metavar="ID")
    arguments = parser.parse_args()
    rows = {row["id"]: row for row in read()}
    for name in arguments.rows:
        with tempfile.TemporaryDirectory() as folder:
            cache = os.environ.get("MOEFW_CACHE", folder)
            own = KEPT.get(rows[name]["stack"], ())
            found = searched(rows[name], arguments.candidates, cache, keep=("sharding", *own))
            beyond = searched(rows[name], arguments.candidates, cache, keep=own)
            found = {**found, "beyond": _best_of(beyond), "commit": record.commit()}
        record.write("tune", {"rows": {**recorded(), name: found}})
    print("\n".join(page(recorded(), rows)))


def recorded() -> dict[str, Any]:
    """Rows of the last record."""
    path = record.RESULTS / "tune.json"
    rows: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else {}
    return rows


def _best_of(found: Found) -> Found | None:
    """Label, time and ratio to the row's layout of the best that a search found; None: nothing fits."""
    if not found["ok"]:
        return None
    best = found["best"]
    ratio = found["own"]["step_time_s"] / best["step_time_s"]
    return {"label": best["label"], "step_time_s": best["step_time_s"], "faster_percent": 100 * (ratio - 1)}


def searched(row: Row, candidates: int, cache: str, keep: Sequence[str] = ()) -> dict[str, Any]:
    """What a search around a row says, and the processor seconds that it took.

    ``cache``: the folder of its cache. ``keep``: what does not vary. ``parameters_bytes``: of the rank of the row's
    layout that needs most memory.
    """
    with tempfile.TemporaryDirectory() as folder:
        spec, software = Path(folder) / "spec.yaml", Path(folder) / "software.yaml"
        spec.write_text(json.dumps(spec_of(row)), encoding="utf-8")
        software.write_text(json.dumps(plain(row.software)), encoding="utf-8")
        system = row["system"].lower().removeprefix("dgx-")
        command = [sys.executable, "-m", "moefw", "tune", str(spec), "--cluster", system, "--gpus", row["gpus"]]
        command += ["--candidates", str(candidates), "--as", str(software), "--json"]
        for name in keep:
            command += ["--keep", name]
        environment = {**os.environ, "MOEFW_CACHE": cache}
        plan = [sys.executable, "-m", "moefw", "plan", str(spec), "--world", row["gpus"], "--json"]
        held = json.loads(subprocess.run(plan, env=environment, capture_output=True, check=True).stdout)["held"]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        told = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if not told.stdout:
        raise RuntimeError(f"the search around {row['id']} ended without an answer: {told.stderr}")
    found: dict[str, Any] = json.loads(told.stdout)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {**found, "cpu_s": cpu_s, "parameters_bytes": held["parameters"]}


def page(found: Mapping[str, Found], rows: Mapping[str, Row]) -> Iterator[str]:
    """Yield the lines of the page."""
    yield HEAD
    head = (
        "row",
        "",
        "published TFLOPS",
        "its layout",
        "predicted s",
        "GiB left",
        "best found s",
        "below the best",
        "verdict",
    )
    yield f"| {' | '.join(head)} |"
    yield "|---" * len(head) + "|"
    for name, each in found.items():
        yield f"| {' | '.join(_cells(rows[name], each))} |"
    if missing := [name for name in ROWS if name not in found]:
        yield f"\nNot searched yet: {', '.join(missing)}."
    for name, each in found.items():
        yield ""
        yield from _section(rows[name], each)


def _cells(row: Row, found: Found) -> Iterator[str]:
    yield row["id"]
    yield f"{row['model_printed']}, {row['gpus']} {row['system']}, {row['precision']}, batch {row['global_batch']}"
    yield row["truth_tflops"]
    yield " ".join(f"{axis} {row.number(field)}" for axis, field in AXES.items())
    if not found["ok"]:
        yield from ("", "", "", "", "missed: nothing fits")
        return
    own = found["own"]
    yield f"{own['step_time_s']:.2f}"
    yield f"{own['left_bytes'] / GIB:.1f}"
    yield f"{found['best']['step_time_s']:.2f}"
    yield f"{_below(found):.1f} %"
    yield _verdict(found)


AXES: Final = {"tp": "tp", "pp": "pp", "chunks": "vpp", "ep": "ep", "micro-batch": "micro_batch"}


def _below(found: Found) -> float:
    """Percent by which the row's layout is predicted below the best that was found."""
    return 100 * (1 - found["best"]["step_time_s"] / found["own"]["step_time_s"])


def _verdict(found: Found) -> str:
    own = found["own"]
    if not own["fits"]:
        parameters = f"parameters, in fp32, take {found['parameters_bytes'] / GIB:.1f}"
        return f"missed: {-own['left_bytes'] / GIB:.1f} GiB are missing; {parameters}"
    below_group = own["below_tied_percent"]
    if not below_group:
        return "found: tied"
    if below_group <= ALLOWED:
        return f"found: {below_group:.1f} % below the tied group"
    return f"missed: {below_group:.1f} % below the tied group"


def _section(row: Row, found: Found) -> Iterator[str]:
    yield f"## {row['id']}: {row['model_printed']} on {row['gpus']} {row['system']}, batches of {row['global_batch']}\n"
    if row.recipe:
        yield f"Its [recipe]({row.recipe['url']}): {row.recipe['says']}.\n"
    if not found["ok"]:
        for problem in found["problems"]:
            yield f"- {problem['what']} {problem['fix'] or ''}".rstrip()
        return
    best, own, time = found["best"], found["own"], found["best"]["time"]
    bar = time["error_percent"]
    far = f", with {', '.join(time['extrapolated'])} far from published rows" if time["extrapolated"] else ""
    yield f"- The best found: {best['label']}."
    yield (
        f"- It takes {best['step_time_s']:.2f} s, give or take {bar:.0f} %: {time['model_tflops_per_gpu']:.0f} TFLOPS "
        f"a GPU{far}; {best['left_bytes'] / GIB:.1f} GiB are left."
    )
    yield f"- The published layout takes {own['step_time_s']:.2f} s: {', '.join(_differences(own, best))}."
    yield from _refutation(row, found)
    beyond = found["beyond"]
    if beyond is not None and beyond["step_time_s"] < min(own["step_time_s"], best["step_time_s"]):
        yield (
            f"- With other sharding, of which no run was published: {beyond['label']}, which takes "
            f"{beyond['step_time_s']:.2f} s, {beyond['faster_percent']:.0f} % faster than the published layout."
        )
    yield "- Why others lose:"
    yield from (f"  - {reason}" for reason in found["reasons"])
    counts = ", ".join(f"{name}: {number}" for name, number in found["counts"].items())
    yield f"- {counts}; {found['cpu_s']:.0f} processor seconds, on the code of commit {found['commit']}."


def _differences(own: Found, best: Found) -> Iterator[str]:
    """Yield the categories that make the largest difference between the step of the published layout and the best."""
    of_own, of_best = own["added_seconds"], best["added_seconds"]
    changes = {name: of_own.get(name, 0.0) - of_best.get(name, 0.0) for name in {*of_own, *of_best}}
    for name in sorted(changes, key=lambda each: -abs(changes[each]))[:CATEGORIES]:
        yield f"{name} {changes[name]:+.2f} s"


def _refutation(row: Row, found: Found) -> Iterator[str]:
    """Yield what measurement would refute the prediction."""
    ratio = found["own"]["step_time_s"] / found["best"]["step_time_s"]
    error = found["own"]["error_of_ratio_percent"] / 100
    published = float(row["truth_tflops"])
    low, high = published * ratio * (1 - error), published * ratio * (1 + error)
    gain = "A gain is predicted" if ratio > 1 + error else "No gain is predicted"
    speed = f"{100 * abs(ratio - 1):.1f} ± {100 * error:.0f} % {'faster' if ratio > 1 else 'slower'}"
    yield (
        f"- {gain}: the best is {speed}. Measured on these GPUs with this software, it trains at {low:.0f} to "
        f"{high:.0f} TFLOPS a GPU, or the prediction is refuted."
    )


if __name__ == "__main__":
    main()
