"""``moefw doctor``: what of this machine and its libraries works, found out by really using it.

Each probe runs in a child, because a broken CUDA library may take the interpreter down.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, metadata, version
from pathlib import Path
from typing import Literal

import click
from attrs import asdict, frozen
from packaging.specifiers import SpecifierSet
from rich.console import Console
from rich.table import Table

from moefw.commands.fp8_products import fp8_products

TIMEOUT_S = 20.0
WORKERS = 2
LOW_DISK_BYTES = 2**30
NEEDED = ("python", "torch", "gloo", "grouped_mm", "safetensors")
"""What training cannot do without."""


@frozen
class Capability:
    """One thing that the machine has, has broken, or lacks; ``fix`` is what to do then."""

    name: str
    state: Literal["available", "unusable", "missing"]
    version: str = ""
    detail: str = ""
    fix: str = ""


class _ProbeError(Exception):
    """A probe's answer in words of ours. ``missing``: the package is here, but built without what is asked for."""

    def __init__(self, detail: str, *, missing: bool = False) -> None:
        super().__init__(detail)
        self.missing = missing


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
@click.option("--timeout", type=click.FloatRange(min=1), default=TIMEOUT_S, show_default=True, help="Seconds in all.")
def doctor(as_json: bool, timeout: float) -> None:
    """Tell what is available here, what is installed but unusable and why, and how to install what is missing.

    Exits with 1 if something is not available that training needs.
    """
    with Console(stderr=True).status("trying what is installed"):
        found = examine(timeout_s=timeout)
    stops = [item.name for item in found if item.name in NEEDED and item.state != "available"]
    if as_json:
        click.echo(json.dumps({"can_train": not stops, "capabilities": [asdict(item) for item in found]}, indent=2))
    else:
        _print(found)
        click.echo(f"Training cannot run here: see {', '.join(stops)}." if stops else "Training can run here.")
    click.get_current_context().exit(1 if stops else 0)


def examine(*, timeout_s: float) -> list[Capability]:
    """Try everything, within about ``timeout_s`` seconds in all."""
    deadline = time.monotonic() + timeout_s
    found = [_python(), _machine(), _disk(), _working_directory()]
    absent = [name for name, probe in PROBES.items() if importlib.util.find_spec(probe.package) is None]
    found += [Capability(name, "missing", fix=PROBES[name].fix) for name in absent]
    groups = [[name for name in group if name not in absent] for group in GROUPS]
    with ThreadPoolExecutor(WORKERS) as pool:
        for answers in pool.map(lambda group: ask(group, deadline=deadline), groups):
            found += answers
    order = ["python", *PROBES]
    return sorted(found, key=lambda item: order.index(item.name) if item.name in order else len(order))


def ask(names: Sequence[str], *, deadline: float) -> list[Capability]:
    """Run probes in one child, and those that are left in a new one when it dies of the probe that it is at."""
    answers: list[Capability] = []
    pending = list(names)
    # What this process can import, the child can; -P keeps -m from putting the working directory first.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    while pending:
        left_s = max(deadline - time.monotonic(), 0.0)
        command, fix = [sys.executable, "-P", "-m", __name__, *pending], ""
        try:
            child = subprocess.run(
                command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=left_s
            )
            output, why = child.stdout, _death(child)
        except subprocess.TimeoutExpired as late:
            why = f"no answer within {left_s:.0f} s" if left_s else "no time was left to try it"
            output, fix = late.stdout or b"", "Try a longer --timeout."
        lines = output.splitlines()
        answers += [Capability(**json.loads(line)) for line in lines]
        del pending[: len(lines)]
        if pending:
            answers.append(_unusable(pending.pop(0), why, fix))
    return answers


def _death(child: subprocess.CompletedProcess[bytes]) -> str:
    if child.returncode < 0:
        return f"it kills the interpreter ({signal.Signals(-child.returncode).name})"
    last = child.stderr.decode(errors="replace").strip().splitlines()[-1:]
    return " ".join([f"it ends the interpreter with exit code {child.returncode}", *last])


def answer(names: Iterable[str]) -> None:
    """Be the child: write one JSON line a probe to stdout, and nothing else that a library may print."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in names:
        print(json.dumps(asdict(_try(name))), file=out, flush=True)
    os._exit(0)


def _try(name: str) -> Capability:
    probe = PROBES[name]
    try:
        found, detail = probe.run()
    except _ProbeError as error:
        if error.missing:
            return Capability(name, "missing", detail=str(error), fix=probe.fix)
        return _unusable(name, str(error))
    except (Exception, SystemExit) as error:
        sentence = re.split(r"\n|(?<=\.)\s", str(error).strip())[0]
        return _unusable(name, f"{type(error).__name__}: {sentence[:200]}")
    return Capability(name, "available", found, detail)


def _unusable(name: str, why: str, fix: str = "") -> Capability:
    try:
        found = version(PROBES[name].distribution)
    except PackageNotFoundError:
        found = ""
    return Capability(name, "unusable", found, why, fix or PROBES[name].fix)


def _python() -> Capability:
    here = platform.python_version()
    try:
        wanted = metadata("moefw")["Requires-Python"]
    except PackageNotFoundError:
        why = "moefw is not installed here, so none of its plugins is found"
        return Capability("python", "unusable", here, why, "pip install moefw")
    if not SpecifierSet(wanted).contains(here, prereleases=True):
        return Capability("python", "unusable", here, f"moefw wants {wanted}", "Install another Python.")
    return Capability("python", "available", here, sys.executable)


def _machine() -> Capability:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    num_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = Path(limit).read_text().strip() if Path(limit).is_file() else ""
        num_bytes = min(num_bytes, int(text)) if text.isdigit() else num_bytes
    return Capability("cores and memory", "available", detail=f"{cores} cores, {_gib(num_bytes)} of memory")


def _disk() -> Capability:
    free = shutil.disk_usage(".").free
    if free < LOW_DISK_BYTES:
        return Capability("disk", "unusable", "", f"only {_gib(free)} are free here", "Point run.dir to another disk.")
    return Capability("disk", "available", detail=f"{_gib(free)} free here")


def _working_directory() -> Capability:
    name, here = "working directory", os.getcwd()
    try:
        with tempfile.TemporaryFile(dir=here) as file:
            file.write(b"moefw")
    except OSError as error:
        return Capability(name, "unusable", "", f"{here}: {error.strerror}", "Point run.dir to a writable folder.")
    return Capability(name, "available", detail=f"{here} is writable")


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def _torch() -> tuple[str, str]:
    import torch

    build = f"CUDA {torch.version.cuda} build" if torch.version.cuda else "CPU build"
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    named = [f"{device.name} (compute capability {device.major}.{device.minor})" for device in devices]
    return str(torch.__version__), f"{build}; {', '.join(named) or 'no GPU'}; {torch.get_num_threads()} threads"


def _cpu_bf16() -> tuple[str, str]:
    import torch

    a, b = torch.randn(32, 32), torch.randn(32, 32)
    if not torch.allclose((a.bfloat16() @ b.bfloat16()).float(), a @ b, rtol=0.1, atol=0.5):
        raise _ProbeError("a product of two bf16 matrices is wrong")
    info = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").is_file() else []
    found = [flag for flag in ("amx_bf16", "avx512_bf16", "bf16") if flag in info]
    instructions = f"the CPU has {', '.join(found)}" if found else "the CPU has no AMX or AVX512_BF16, so it is slow"
    return "", f"{torch.backends.cpu.get_cpu_capability()} kernels; {instructions}"


def _gloo() -> tuple[str, str]:
    from torch import distributed

    if not distributed.is_gloo_available():
        raise _ProbeError("this torch is built without it", missing=True)
    return "", _all_reduce("gloo", "cpu")


def _nccl() -> tuple[str, str]:
    import torch
    from torch import distributed

    if not distributed.is_nccl_available():
        raise _ProbeError("this torch is built without it", missing=True)
    if not torch.cuda.is_available():
        raise _ProbeError("it moves data between GPUs, and torch sees none")
    found = torch.cuda.nccl.version()
    return ".".join(map(str, found)), _all_reduce("nccl", "cuda")


def _all_reduce(backend: str, device: str) -> str:
    import torch
    from torch import distributed

    store = distributed.HashStore()  # type: ignore[attr-defined]
    distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    ones = torch.ones(4, device=device)
    distributed.all_reduce(ones)
    total = ones.sum().item()
    distributed.destroy_process_group()
    if total != 4:
        raise _ProbeError("an all-reduce in a world of one changes the values")
    return "an all-reduce in a world of one works"


def _grouped_mm() -> tuple[str, str]:
    import torch

    cases = [("cpu", "bfloat16"), ("cpu", "float32")]
    if torch.cuda.is_available():
        cases += [("cuda", "bfloat16"), ("cuda", "float32")]
    troubles = {f"{dtype} on {device}": _grouped_mm_trouble(device, getattr(torch, dtype)) for device, dtype in cases}
    detail = "; ".join(f"{case} {f'fails: {trouble}' if trouble else 'works'}" for case, trouble in troubles.items())
    for device in {device for device, _ in cases}:
        if all(trouble for case, trouble in troubles.items() if case.endswith(device)):
            raise _ProbeError(detail)
    return "", detail


def _grouped_mm_trouble(device: str, dtype: object) -> str:
    import torch
    from torch.nn.functional import grouped_mm

    rows = torch.randn(24, 16, device=device).to(dtype)  # type: ignore[call-overload]
    weights = torch.randn(2, 16, 16, device=device).to(dtype)  # type: ignore[call-overload]
    ends = torch.tensor([8, 24], device=device, dtype=torch.int32)
    wanted = torch.cat([rows[:8].float() @ weights[0].float(), rows[8:].float() @ weights[1].float()])
    try:
        found = grouped_mm(rows, weights, offs=ends).float()
    except RuntimeError as error:
        return str(error).partition("\n")[0][:120]
    return "" if torch.allclose(found, wanted, rtol=0.1, atol=0.5) else "wrong values"


def _triton() -> tuple[str, str]:
    import triton
    from triton.runtime import driver

    try:
        target = driver.active.get_current_target()
    except RuntimeError:
        return triton.__version__, "no GPU driver; interpreter only: TRITON_INTERPRET=1"
    return triton.__version__, f"compiles for {target.backend} {target.arch}"


def _transformer_engine() -> tuple[str, str]:
    importlib.import_module("transformer_engine.pytorch")
    import torch

    from moefw.plugins.precision.quantized.te.machine import RECIPES

    found = version("transformer-engine")
    if not torch.cuda.is_available():
        return found, "its compiled parts import; it computes on a GPU, and torch sees none"
    capability = ".".join(map(str, torch.cuda.get_device_capability()))
    names = [name for name, gpus in RECIPES.items() if capability in gpus.capabilities]
    return found, f"backend: te on compute capability {capability}: {', '.join(names) or 'no recipe'}"


def _deep_ep() -> tuple[str, str]:
    deep_ep = importlib.import_module("deep_ep")
    buffers = [name for name in ("Buffer", "ElasticBuffer", "EPBuffer") if hasattr(deep_ep, name)]
    if not buffers:
        raise _ProbeError("what is installed as deep_ep has none of DeepEP's buffers")
    return str(getattr(deep_ep, "__version__", "")), f"has {', '.join(buffers)}"


def _tensorboard() -> tuple[str, str]:
    import tensorboard
    from torch.utils.tensorboard import SummaryWriter

    with tempfile.TemporaryDirectory() as folder, SummaryWriter(folder) as writer:
        writer.add_scalar("loss", 1.0, 0)
    return tensorboard.__version__, ""


def _matplotlib() -> tuple[str, str]:
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    FigureCanvasAgg(Figure(figsize=(1, 1))).print_png(io.BytesIO())  # type: ignore[no-untyped-call]
    return matplotlib.__version__, ""


def _tokenizers() -> tuple[str, str]:
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    if tokenizer.encode("b").ids != [1]:
        raise _ProbeError("it encodes a word wrongly")
    return tokenizers.__version__, ""


def _safetensors() -> tuple[str, str]:
    import safetensors
    import torch
    from safetensors.torch import load, save

    tensor = torch.arange(5)
    if not load(save({"x": tensor}))["x"].equal(tensor):
        raise _ProbeError("a tensor comes back changed")
    return safetensors.__version__, ""


@frozen
class _Probe:
    """What to run for a capability: it returns version and detail, or raises. ``package`` is the import name."""

    run: Callable[[], tuple[str, str]]
    package: str
    distribution: str
    fix: str


_OTHER_TORCH = "pip install 'torch>=2.11'"
_CUDA_TORCH = "On a machine with GPUs, a CUDA build: pip install --force-reinstall 'torch>=2.11'"
_TE = "pip install --no-build-isolation 'moefw[te]'"
PROBES: Mapping[str, _Probe] = {
    "torch": _Probe(_torch, "torch", "torch", _OTHER_TORCH),
    "gloo": _Probe(_gloo, "torch", "torch", _OTHER_TORCH),
    "nccl": _Probe(_nccl, "torch", "torch", _CUDA_TORCH),
    "bf16 on this CPU": _Probe(_cpu_bf16, "torch", "torch", _OTHER_TORCH),
    "grouped_mm": _Probe(_grouped_mm, "torch", "torch", _OTHER_TORCH),
    "fp8 products": _Probe(fp8_products, "torch", "torch", _OTHER_TORCH),
    "triton": _Probe(_triton, "triton", "triton", "On Linux: pip install triton"),
    "transformer-engine": _Probe(_transformer_engine, "transformer_engine", "transformer-engine", _TE),
    "deep_ep": _Probe(_deep_ep, "deep_ep", "sgl-deep-ep", "pip install 'moefw[deepep]'"),
    "tensorboard": _Probe(_tensorboard, "tensorboard", "tensorboard", "pip install tensorboard"),
    "matplotlib": _Probe(_matplotlib, "matplotlib", "matplotlib", "pip install matplotlib"),
    "tokenizers": _Probe(_tokenizers, "tokenizers", "tokenizers", "pip install tokenizers"),
    "safetensors": _Probe(_safetensors, "safetensors", "safetensors", "pip install safetensors"),
}
GROUPS = (
    ("torch", "gloo", "grouped_mm", "safetensors", "bf16 on this CPU", "fp8 products", "tensorboard", "triton", "nccl"),
    ("transformer-engine",),
    ("deep_ep",),
    ("tokenizers", "matplotlib"),
)
"""Probes that share a child, as to import torch takes seconds; what training needs comes first, so it has the time."""


def _print(found: Sequence[Capability]) -> None:
    console = Console(markup=False, highlight=False)
    if console.is_terminal:
        table = Table("capability", "state", "version", "detail")
        styles = {"available": "green", "unusable": "red", "missing": "yellow"}
        for item in found:
            table.add_row(item.name, item.state, item.version, "\n".join(_lines(item)), style=styles[item.state])
        console.print(table)
        return
    names, versions = (max(map(len, column)) for column in zip(*((item.name, item.version) for item in found)))
    for item in found:
        head = f"{item.state:<9}  {item.name:<{names}}  {item.version:<{versions}}  "
        first, *more = _lines(item)
        click.echo(f"{head}{first}".rstrip())
        for line in more:
            click.echo(" " * len(head) + line)


def _lines(item: Capability) -> list[str]:
    lines = [item.detail, f"-> {item.fix}" if item.fix else ""]
    return [line for line in lines if line] or [""]


if __name__ == "__main__":
    answer(sys.argv[1:])
