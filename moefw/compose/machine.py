"""Hardware of this machine, found without importing torch, and the site of a layer in a world of one rank."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from moefw.core.site import Dims, Machine, Site
from moefw.runtime.parallel.meshes import DENSE, EXPERT, Mesh, MeshPlan


def this_machine(device: str = "auto") -> Machine:
    """This machine's hardware without importing torch. ``auto`` is CUDA if a GPU is visible."""
    num_gpus = _num_visible_gpus()
    if device == "auto":
        device = "cuda" if num_gpus else "cpu"
    if device != "cuda":
        return Machine(device=device, num_devices=os.cpu_count() or 1)
    return Machine(device=device, num_devices=num_gpus, capability=_capability() if num_gpus else None)


def lone_site(dims: Dims, machine: Machine, *, layer: int = 0) -> Site:
    """Site of a layer, the last of its model, in a world of one rank."""
    dense, experts = (Mesh(tuple((axis, 1) for axis in axes)) for axes in (DENSE, EXPERT))
    plan = MeshPlan(dense=dense, experts=experts)
    return Site(dims=dims, layer=layer, num_layers=layer + 1, layout=plan, ranks_per_node=None, machine=machine)


def _num_visible_gpus() -> int:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    present = len(list(Path("/dev").glob("nvidia[0-9]*")))
    if visible is None:
        return present
    return min(present, len([name for name in visible.split(",") if name.strip() not in ("", "-1")]))


def _capability() -> str | None:
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return min((line for line in said.split() if line.replace(".", "", 1).isdigit()), key=float, default=None)
