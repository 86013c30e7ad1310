"""All that needs a GPU, in one call from the working tree: correct first, then measured beside its goals, then written.

    python benchmarks/on_gpu.py [--parts kernels layers ...] [--out FOLDER] [--dry]

Needs torch and Triton. moefw need not be installed; what else is missing can be carried (``gather_wheels.py``). Each
part runs in its own process for at most eight minutes, so that no part costs the others their results. A run is
appended to ``results/gpu.json``, and to ``gpu.json`` in the folder that ``--out`` or the variable ``OUT`` names, after
each of its parts. ``--dry`` runs all code on a CPU with small shapes, and writes only to that folder.

Exit code 1 if a part fails, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from statistics import median
from typing import Any

import torch

import goal
import record

ROOT = Path(__file__).parent.parent
CARRIED = ROOT / ".offline"
PACKAGES = Path(torch.__file__).parents[1]
LIMIT_S = 480
TOLD = 6000
"""Characters to keep from the end of a part's output."""
SAMPLE_S = 5.0
READINGS = "clocks.sm,clocks.mem,power.draw,power.limit,temperature.gpu"


@dataclass(frozen=True)
class Part:
    """Arguments of Python for a part on a GPU, and for the same code with small shapes on a CPU."""

    full: Sequence[str]
    small: Sequence[str]


def script(name: str, *arguments: str, small: Sequence[str] = ("--rounds", "1")) -> Part:
    """Return the part that runs a benchmark."""
    path = f"benchmarks/{name}.py"
    return Part([path, *arguments], [path, *arguments, *small, "--dry"])


def kernels(*names: str, some: str) -> Part:
    """Return the part that runs tests of kernels; ``some`` selects those of the small run."""
    pytest = ["-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider"]
    pytest += [f"tests/kernels/test_{name}.py" for name in names]
    return Part(pytest, [*pytest, "-k", some])


def quickstart(*overrides: str, small: Sequence[str] = ()) -> Part:
    """Return the part that trains the quickstart on one rank with the overrides; the small run also has ``small``."""
    train = ["-m", "moefw", "train", "examples/quickstart.yaml", "parallel={}", *overrides]
    less = ["data.path=CONTRIBUTING.md", "data.tokenizer=bytes", "model.num_layers=1", "model.num_experts=4"]
    less += ["train.steps=2", "train.micro_batch=1", "train.seq_len=32", "train.tokens_per_step=32"]
    less += ["train.eval_tokens=32", "train.schedule={use: cosine}", "run.device=cpu"]
    return Part([*train, "run.device=cuda", "train.steps=200"], [*train, *less, *small])


def example(folder: str, file: str, some: str) -> Part:
    """Return the part that runs tests of an example; ``some`` selects those of the small run."""
    pytest = ["-m", "pytest", "-q", "-rs", "--tb=short", "-p", "no:cacheprovider", "-o", f"pythonpath={folder}"]
    pytest += [f"{folder}/tests/{file}"]
    return Part(pytest, [*pytest, "-k", some])


FP8 = "precision={use: fp8-blockwise, backend: torch}"
OFFLOAD = "memory=[{use: offload, regions: [experts, attention], min_bytes: 1}]"
PARTS: Mapping[str, Part] = {
    "kernels": kernels(
        *("quantize_kernels", "swiglu_kernels", "paged_copy", "swizzle", "gather_sum", "empty_groups", "counting_sort"),
        some="tile_has_the_order or free_list",
    ),
    "router-kernels": kernels("routing_kernel", "balance_kernels", some="every_score or equal_length"),
    "other-kernels": kernels("rope", "random", "add_wgrad", some="one_group or rounded_once"),
    "triton-gemm": kernels("expert_gemm", some="they_declare or is_refused"),
    "products": kernels("grouped_gemm", "fused_quantize", some="cannot_be_multiplied"),
    "dispatchers": script("one_rank", small=()),
    "overhead": script("gpu_overhead", small=()),
    "layers": script("fp8_layer"),
    "quickstart": quickstart(),
    "quickstart-fp8": quickstart(FP8, small=["precision.backend=emulate"]),
    "quickstart-offload": quickstart(OFFLOAD),
    "quickstart-graphs": quickstart("train.graphs=step", small=["train.graphs=none"]),
    "goals": script("layer_goals", "--only", "a", "b", "c", "gemms-a", "gemms-c", "gemms-b"),
    "others": script("layer_goals", "--only", "others-a", "others-c", "others-b"),
    "limits": script("layer_goals", "--only", "granularity", "few tokens", "skew", "counters"),
    "offload": script("offload_overlap"),
    "quantizers": script("fused_quantize"),
    "overlap": script("overlap_on_gpu", small=()),
    "graphs": script("graphs_on_gpu"),
    "quack": example("examples/quack_gemm", "test_quack_kernels.py", some="few or add_up"),
}


def main() -> int:
    """Run the parts in order, print the result of each, and write all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path, default=os.environ.get("OUT"), help="folder for gpu.json; default: $OUT")
    parser.add_argument("--dry", action="store_true", help="on a CPU, with small shapes")
    given = parser.parse_args()
    if not given.dry and not torch.cuda.is_available():
        print("on_gpu: torch sees no GPU. Run it where there is one, with a CUDA build of torch.", file=sys.stderr)
        return 2
    folders = ([] if given.dry else [record.RESULTS]) + ([Path(given.out)] if given.out else [])
    parts: dict[str, dict[str, Any]] = {}
    run = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": record.commit(), "dry": given.dry}
    run |= {"machine": record.machine(), "at_rest": reading(), "parts": parts}
    earlier = {folder: runs(folder / "gpu.json") for folder in folders}
    with tempfile.TemporaryDirectory() as scratch:
        announce(Path(scratch))
        for name in given.parts:
            parts[name] = perform(PARTS[name], Path(scratch), dry=given.dry)
            print(f"{name:20} {outcome(parts[name]):24} {parts[name]['seconds']:7.1f} s", flush=True)
            for folder in folders:
                replace(folder / "gpu.json", [*earlier[folder], run])
    if given.dry:
        print("A dry run: these are small shapes on a CPU, whose numbers say nothing of the goals.")
    print(goal.table(goals(parts)))
    return int(any(part["failed"] for part in parts.values()))


def perform(part: Part, scratch: Path, *, dry: bool) -> dict[str, Any]:
    """Run a part and return its result: what it measured, the end of its output, and the GPU's clocks and power."""
    arguments = part.small if dry else part.full
    with tempfile.TemporaryDirectory(dir=scratch) as folder, tempfile.TemporaryFile("w+") as output:
        if "train" in arguments:
            arguments = [*arguments, f"run.dir={folder}/run"]
        began = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=environment(scratch, Path(folder) / "results", dry=dry),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        readings, timed_out = watch(process, began + LIMIT_S)
        output.seek(0)
        return {
            "exit_code": process.returncode,
            "timed_out": timed_out,
            "failed": process.returncode != 0,
            "seconds": round(time.monotonic() - began, 1),
            "gpu": typical(readings),
            "measured": {path.stem: json.loads(path.read_text()) for path in Path(folder).glob("results/*.json")},
            "said": without_places(output.read(), scratch)[-TOLD:],
        }


def without_places(text: str, scratch: Path) -> str:
    """Return a text whose paths begin where the project, the packages or the scratch folder do."""
    for place, name in ((scratch, "SCRATCH"), (PACKAGES, "PACKAGES"), (ROOT, ".")):
        text = text.replace(str(place), name)
    return text


def watch(process: subprocess.Popen[bytes], until: float) -> tuple[list[dict[str, float]], bool]:
    """Wait for a process and read the GPU meanwhile. At the time ``until``, end it and all that it started."""
    readings = []
    try:
        while (left_s := until - time.monotonic()) > 0:
            try:
                process.wait(min(SAMPLE_S, left_s))
                return readings, False
            except subprocess.TimeoutExpired:
                readings += [found] if (found := reading()) else []
        return readings, True
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def environment(scratch: Path, results: Path, *, dry: bool) -> dict[str, str]:
    """Return the variables of a part. Its path has the working tree, our metadata, and what is carried and missing."""
    path = [ROOT, ROOT / "kernels", scratch / "metadata", *(folder for folder in carried() if missing(folder.name))]
    more = os.environ.get("PYTHONPATH")
    where = {"CUDA_VISIBLE_DEVICES": ""} if dry else {"MOEFW_KERNELS_ON": "cuda"}
    return {
        **os.environ,
        **where,
        "PYTHONPATH": os.pathsep.join([*map(str, path), *([more] if more else [])]),
        "MOEFW_RESULTS": str(results),
        "PYTHONUNBUFFERED": "1",
    }


def announce(scratch: Path) -> None:
    """Write the metadata by which moefw's plugins are found, as an installation would, from ``pyproject.toml``."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    folder = scratch / "metadata" / "moefw-0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0\n")
    groups = {"console_scripts": project["scripts"], **project["entry-points"]}
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {place}\n" for name, place in each.items())
        for group, each in groups.items()
    ]
    (folder / "entry_points.txt").write_text("\n".join(lines))


def carried() -> list[Path]:
    """Return the folders of carried packages, each named like its package."""
    return sorted(path for path in CARRIED.glob("*") if path.is_dir())


def missing(package: str) -> bool:
    """Return whether a package is not installed."""
    try:
        distribution(package)
    except PackageNotFoundError:
        return True
    return False


def reading() -> dict[str, float] | None:
    """Return clocks in MHz, power in W and temperature in degrees Celsius of the first GPU; None if nobody tells."""
    command = ["nvidia-smi", "--id=0", f"--query-gpu={READINGS}", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=SAMPLE_S, check=True).stdout
        return dict(zip(READINGS.split(","), map(float, said.split(",")), strict=True))
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def typical(readings: Sequence[Mapping[str, float]]) -> dict[str, float] | None:
    """Return the median of each reading; None without any."""
    return {name: median(one[name] for one in readings) for name in readings[0]} if readings else None


def outcome(part: Mapping[str, Any]) -> str:
    """Return how a part ended."""
    return f"ended after {LIMIT_S} s" if part["timed_out"] else f"exit code {part['exit_code']}"


def goals(parts: Mapping[str, Mapping[str, Any]]) -> list[goal.Goal]:
    """Return the goals of all parts."""
    return [
        one for part in parts.values() for measured in part["measured"].values() for one in measured.get("goals", ())
    ]


def runs(path: Path) -> list[dict[str, Any]]:
    """Return the runs that a file holds, of which there may be none."""
    found: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    return found


def replace(path: Path, runs: Sequence[Mapping[str, Any]]) -> None:
    """Write runs into a file, which holds the old or the new ones at any moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(runs, indent=1) + "\n")
    new.replace(path)


if __name__ == "__main__":
    sys.exit(main())
