"""All checks that need a GPU, in one call: kernels against their references, layers against fp32, then times.

    python benchmarks/on_gpu.py [--parts kernels quickstart ...]

Each part runs in its own process, so that a failure does not affect the others. After each part, the end of its output
and its time are written to ``results/on_gpu.json``. Benchmarks also write their own results to this folder.
Exit code 1 if a part fails; 2 without a GPU.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import record
import torch

ROOT = Path(__file__).parent.parent
LAYER, REFUSED = "benchmarks/fp8_layer.py", 2
"""Exit code of ``LAYER`` if this GPU has no products for a recipe."""
KERNELS = ("quantize_kernels", "swiglu_kernels", "fused_quantize", "grouped_gemm", "paged_copy", "swizzle")
QUICKSTART = ("-m", "moefw", "train", "examples/quickstart.yaml", "parallel={}", "run.device=cuda", "train.steps=200")
OFFLOAD = "memory=[{use: offload, regions: [experts, attention], min_bytes: 1}]"
PARTS: Mapping[str, Sequence[str]] = {
    "kernels": ("-m", "pytest", "-q", *(f"tests/kernels/test_{name}.py" for name in KERNELS)),
    "fp8-blockwise": (LAYER,),
    "fp8-tensor": (LAYER, "--recipe", "fp8-tensor"),
    "mxfp8": (LAYER, "--recipe", "mxfp8"),
    "nvfp4": (LAYER, "--recipe", "nvfp4"),
    "fused quantizers": ("benchmarks/fused_quantize.py",),
    "quickstart": QUICKSTART,
    "quickstart, fp8-blockwise": (*QUICKSTART, "precision={use: fp8-blockwise, backend: torch}"),
    "quickstart, offload": (*QUICKSTART, OFFLOAD),
}
"""Arguments of Python for each part."""
TOLD = 4000
"""Characters to keep from the end of a part's output."""


def main() -> int:
    """Run the parts in order, print the result of each, and write all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    names = parser.parse_args().parts
    if not torch.cuda.is_available():
        print("on_gpu: torch sees no GPU. Run it where there is one, with a CUDA build of torch.", file=sys.stderr)
        return 2
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        found[name] = run(PARTS[name])
        print(f"{name:28} exit code {found[name]['exit_code']}  {found[name]['seconds']:7.1f} s", flush=True)
        path = record.write("on_gpu", {"parts": found})
    print(path)
    return int(any(part["failed"] for part in found.values()))


def run(arguments: Sequence[str]) -> dict[str, Any]:
    """Run a part and return its result. Kernels that tests would interpret run on the GPU."""
    with tempfile.TemporaryDirectory() as folder:
        places = [f"run.dir={folder}/run"] if "train" in arguments else []
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, *arguments, *places],
            cwd=ROOT,
            env={**os.environ, "MOEFW_KERNELS_ON": "cuda"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    return {
        "exit_code": done.returncode,
        "failed": done.returncode not in (0, REFUSED if arguments[0] == LAYER else 0),
        "seconds": round(time.monotonic() - began, 1),
        "said": done.stdout[-TOLD:],
    }


if __name__ == "__main__":
    sys.exit(main())
