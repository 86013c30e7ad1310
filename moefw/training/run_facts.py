"""What a run is: its versions, machine, layout and sizes, for the event that begins it."""

from __future__ import annotations

import os
import platform
import resource
import socket
from pathlib import Path
from typing import Any

import torch

from moefw import __version__
from moefw.training.job import job_names
from moefw.training.session import Session
from moefw.training.versions import library_versions
from moefw.training.what_trains import Parameters
from moefw_kernels.devices import is_gpu

CPUS = Path("/proc/cpuinfo")


def facts(session: Session, parameters: Parameters) -> dict[str, Any]:
    """Fields of the events ``start`` and ``resume``: docs/runs.md."""
    assembly = session.assembly
    dims = assembly.site.dims
    plan = session.layout.plan
    plugins = {distribution: version for _, _, distribution, version in assembly.versions()}
    versions = {"moefw": __version__, "python": platform.python_version()}
    return {
        "versions": {**plugins, **versions, **library_versions(session.device)},
        "machine": {
            "host": socket.gethostname(),
            "device": session.device.type,
            "name": device_name(session.device),
            "computes_on": computing_name(session.device),
            "cores": len(os.sched_getaffinity(0)),
        },
        "jobs": job_names(),
        "ranks": plan.world,
        "layout": {axis: size for axis, size in plan.sizes.items() if size > 1},
        "parameters": parameters.total,
        "frozen_parameters": sum(parameters.frozen.values()),
        "moe_layers": list(assembly.layers),
        "experts": dims.num_experts,
        "top_k": dims.top_k,
        "tokens_per_step": assembly.spec.train.tokens_per_step,
    }


def device_name(device: torch.device) -> str:
    """Name of a GPU or of this machine's processor."""
    if is_gpu(device):
        return torch.cuda.get_device_name(device)
    lines = CPUS.read_text(errors="replace").splitlines() if CPUS.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.machine()


def computing_name(device: torch.device) -> str:
    """Name of what a rank computes on, as clusters name it: its GPU, or the processor and the rank's threads.

    A processor alone is no such name: a rank with twice the threads is twice as fast.
    """
    if is_gpu(device):
        return device_name(device)
    threads = torch.get_num_threads()
    return f"{device_name(device)}, {threads} thread{'' if threads == 1 else 's'}"


def peak_memory(device: torch.device) -> dict[str, Any]:
    """The most memory of this rank so far: that of its GPU, or of its process."""
    if is_gpu(device):
        return {"peak_bytes": torch.cuda.max_memory_allocated(device), "of": "device"}
    return {"peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "of": "process"}
