"""Probes of the libraries, which the doctor runs in a child: ours, and those of other plugins."""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Final

from moefw.commands.doctor.fp8_products import fp8_products
from moefw.commands.doctor.triton_products import triton_products
from moefw.compose.registry import Registry
from moefw.core.errors import Problem
from moefw.core.probes import Probe, ProbeError
from moefw.plugins.dispatchers.deepep.limits import WHEEL_TORCH

OWN_STORES: Final = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Set to 1, torchrun's agents keep their store to themselves, and each start of ranks has a new one."""


def _torch() -> tuple[str, str]:
    import torch

    build = f"CUDA {torch.version.cuda} build" if torch.version.cuda else "CPU build"
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    named = [f"{device.name} (compute capability {device.major}.{device.minor})" for device in devices]
    return str(torch.__version__), f"{build}; {', '.join(named) or 'no GPU'}; {torch.get_num_threads()} threads"


def _cpu_bf16() -> tuple[str, str]:
    import torch

    from moefw.training.cpu_speed import bf16_over_fp32

    a = torch.randn(32, 32)
    b = torch.randn(32, 32)
    if not torch.allclose((a.bfloat16() @ b.bfloat16()).float(), a @ b, rtol=0.1, atol=0.5):
        raise ProbeError("a product of two bf16 matrices is wrong")
    info = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").is_file() else []
    flags = [flag for flag in ("amx_bf16", "avx512_bf16", "bf16") if flag in info]
    instructions = f"the CPU has {', '.join(flags) or 'no AMX or AVX512_BF16'}"
    taken = f"a product takes {bf16_over_fp32():.1f} times as long as one in fp32"
    return "", f"{torch.backends.cpu.get_cpu_capability()} kernels; {instructions}; {taken}"


def _gloo() -> tuple[str, str]:
    from torch import distributed

    if not distributed.is_gloo_available():
        raise ProbeError("this torch is built without it", missing=True)
    return "", _all_reduce("gloo", "cpu")


def _nccl() -> tuple[str, str]:
    import torch
    from torch import distributed

    if not distributed.is_nccl_available():
        raise ProbeError("this torch is built without it", missing=True)
    if not torch.cuda.is_available():
        raise ProbeError("it moves data between GPUs, and torch sees none")
    nccl_version = torch.cuda.nccl.version()
    return ".".join(map(str, nccl_version)), _all_reduce("nccl", "cuda")


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
        raise ProbeError("an all-reduce in a world of one changes the values")
    return "an all-reduce in a world of one works"


def _joining_nodes() -> tuple[str, str]:
    """Whether a node may join torchrun's agents: PyTorch 2.13 was seen to fail with its default."""
    if os.environ.get(OWN_STORES) != "1":
        raise ProbeError("torchrun's agents share their store with the ranks, and fail when a node joins or comes back")
    return "", "each start of torchrun's ranks has a store of its own"


def _grouped_mm() -> tuple[str, str]:
    import torch

    cases = [("cpu", "bfloat16"), ("cpu", "float32")]
    if torch.cuda.is_available():
        cases += [("cuda", "bfloat16"), ("cuda", "float32")]
    troubles = {f"{dtype} on {device}": _grouped_mm_trouble(device, getattr(torch, dtype)) for device, dtype in cases}
    detail = "; ".join(f"{case} {f'fails: {trouble}' if trouble else 'works'}" for case, trouble in troubles.items())
    for device in {device for device, _ in cases}:
        if all(trouble for case, trouble in troubles.items() if case.endswith(device)):
            raise ProbeError(detail)
    return "", detail


def _grouped_mm_trouble(device: str, dtype: object) -> str:
    import torch
    from torch.nn.functional import grouped_mm

    rows = torch.randn(24, 16, device=device).to(dtype)  # type: ignore[call-overload]
    weights = torch.randn(2, 16, 16, device=device).to(dtype)  # type: ignore[call-overload]
    ends = torch.tensor([8, 24], device=device, dtype=torch.int32)
    expected = torch.cat([rows[:8].float() @ weights[0].float(), rows[8:].float() @ weights[1].float()])
    try:
        product = grouped_mm(rows, weights, offs=ends).float()
    except RuntimeError as error:
        return str(error).partition("\n")[0][:120]
    return "" if torch.allclose(product, expected, rtol=0.1, atol=0.5) else "wrong values"


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

    installed = version("transformer-engine")
    if not torch.cuda.is_available():
        return installed, "its compiled parts import; it computes on a GPU, and torch sees none"
    capability = ".".join(map(str, torch.cuda.get_device_capability()))
    names = [name for name, gpus in RECIPES.items() if capability in gpus.capabilities]
    return installed, f"backend: te on compute capability {capability}: {', '.join(names) or 'no recipe'}"


def _deep_ep() -> tuple[str, str]:
    deep_ep = importlib.import_module("deep_ep")
    buffers = [name for name in ("Buffer", "ElasticBuffer", "EPBuffer") if hasattr(deep_ep, name)]
    if not buffers:
        raise ProbeError("what is installed as deep_ep has none of DeepEP's buffers")
    return str(getattr(deep_ep, "__version__", "")), f"has {', '.join(buffers)}"


def _tensorboard() -> tuple[str, str]:
    import tensorboard
    from torch.utils.tensorboard import SummaryWriter

    with tempfile.TemporaryDirectory() as folder, SummaryWriter(folder) as writer:
        writer.add_scalar("loss", 1.0, 0)
    return tensorboard.__version__, ""


def _bokeh() -> tuple[str, str]:
    import bokeh
    from bokeh.resources import Resources

    if not Resources(mode="inline", components=["bokeh"]).js_raw[0]:
        raise ProbeError("its script, which a report holds, is empty")
    return bokeh.__version__, ""


def _matplotlib() -> tuple[str, str]:
    import matplotlib
    from matplotlib.figure import Figure

    with tempfile.TemporaryFile() as file:
        Figure().savefig(file, format="png")
    return matplotlib.__version__, ""


def _tokenizers() -> tuple[str, str]:
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    if tokenizer.encode("b").ids != [1]:
        raise ProbeError("it encodes a word wrongly")
    return tokenizers.__version__, ""


def _safetensors() -> tuple[str, str]:
    import safetensors
    import torch
    from safetensors.torch import load, save

    tensor = torch.arange(5)
    if not load(save({"x": tensor}))["x"].equal(tensor):
        raise ProbeError("a tensor comes back changed")
    return safetensors.__version__, ""


_OTHER_TORCH = "pip install 'torch>=2.11'"
_CUDA_TORCH = "On a machine with GPUs, a CUDA build: pip install --force-reinstall 'torch>=2.11'"
_TE = "pip install --no-build-isolation 'moefw[te]'"
_DEEP_EP = f"With torch {WHEEL_TORCH}, which its wheel needs: pip install 'moefw[deepep]'"
PROBES: Mapping[str, Probe] = {
    probe.name: probe
    for probe in (
        Probe("torch", _torch, "torch", "torch", _OTHER_TORCH),
        Probe("gloo", _gloo, "torch", "torch", _OTHER_TORCH),
        Probe("nccl", _nccl, "torch", "torch", _CUDA_TORCH),
        Probe("elastic torchrun", _joining_nodes, "torch", "torch", f"On each node: export {OWN_STORES}=1"),
        Probe("bf16 on this CPU", _cpu_bf16, "torch", "torch", _OTHER_TORCH),
        Probe("grouped_mm", _grouped_mm, "torch", "torch", _OTHER_TORCH),
        Probe("fp8 products", fp8_products, "torch", "torch", _OTHER_TORCH),
        Probe("triton", _triton, "triton", "triton", "On Linux: pip install triton"),
        Probe("transformer-engine", _transformer_engine, "transformer_engine", "transformer-engine", _TE),
        Probe("deep_ep", _deep_ep, "deep_ep", "sgl-deep-ep", _DEEP_EP),
        Probe("tensorboard", _tensorboard, "tensorboard", "tensorboard", "pip install tensorboard"),
        Probe("bokeh", _bokeh, "bokeh", "bokeh", "pip install bokeh"),
        Probe("matplotlib", _matplotlib, "matplotlib", "matplotlib", "pip install matplotlib"),
        Probe("tokenizers", _tokenizers, "tokenizers", "tokenizers", "pip install tokenizers"),
        Probe("safetensors", _safetensors, "safetensors", "safetensors", "pip install safetensors"),
    )
}
_OTHER_PARTS = "Do not train with these kernels here: use gemm: {use: grouped} and precision: {use: bf16}"
DEEP_PROBES: Mapping[str, Probe] = {
    "triton products": Probe("triton products", triton_products, "triton", "triton", _OTHER_PARTS),
}
"""Probes that take long, as they compile: those of ``moefw doctor --deep``."""
GROUPS = (
    (
        "torch",
        "gloo",
        "grouped_mm",
        "safetensors",
        "bf16 on this CPU",
        "fp8 products",
        "tensorboard",
        "triton",
        "nccl",
        "elastic torchrun",
    ),
    ("transformer-engine",),
    ("deep_ep",),
    ("tokenizers", "bokeh", "matplotlib"),
)
"""Probes that share a child, as importing torch takes seconds. Those for training come first, before a time-out."""


def probes_of_plugins() -> tuple[list[Probe], list[Problem]]:
    """Probes of the installed plugins, and the problems of plugins that do not load."""
    registry = Registry()
    problems = registry.load_all()
    return registry.probes, problems


def probe_of(name: str) -> Probe:
    """Probe of that name: ours, or an installed plugin's."""
    ours = {**PROBES, **DEEP_PROBES}
    if name in ours:
        return ours[name]
    of_plugins, _ = probes_of_plugins()
    return next(probe for probe in of_plugins if probe.name == name)
