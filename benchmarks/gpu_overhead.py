"""What one GPU holds that no tensor can have: driver, context and kernels, and NCCL, beside the planner's figures.

The process computes a product and a Triton kernel, then communicates with itself alone. After each, the memory that is
taken on the GPU is read, less what the allocator of PyTorch holds. Groups of several ranks, whose buffers are
larger, need several GPUs. Writes ``gpu_overhead.json``.
"""

from __future__ import annotations

import argparse
import resource

import torch
import torch.distributed as dist

import record
from moefw.planner.cluster import GIB
from moefw.planner.overhead import figures
from moefw_kernels.swiglu import weighted_swiglu
from timing import device_to_measure

ROWS = 256


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="on a CPU, where the memory of the process is read instead")
    given = parser.parse_args()
    device = device_to_measure(dry=given.dry)
    held = {"a tensor": after_a_tensor(device)}
    held["a product and kernels"] = after_kernels(device)
    held["a communicator of one rank"] = after_a_communicator(device)
    figure = figures().driver_and_context_gib.value
    for what, gib in held.items():
        print(f"after {what:28} {gib:6.2f} GiB")
    print(f"planned for driver and context     {figure:6.2f} GiB, of memory as nvidia-smi tells it")
    print(record.write("gpu_overhead", {"held_gib": held, "planned_gib": figure}, dry=given.dry))


def after_a_tensor(device: torch.device) -> float:
    """Return GiB that are held once there is a tensor."""
    torch.ones(1, device=device)
    return held_gib(device)


def after_kernels(device: torch.device) -> float:
    """Return GiB that are held once libraries and kernels of a step are loaded."""
    x_RD = torch.randn(ROWS, ROWS, device=device, dtype=torch.bfloat16, requires_grad=True)
    (x_RD @ x_RD).sum().backward()
    with torch.no_grad():  # with autograd, and for fp32, operators of PyTorch run in the kernel's place
        weighted_swiglu(x_RD, torch.ones(ROWS, device=device))
    return held_gib(device)


def after_a_communicator(device: torch.device) -> float:
    """Return GiB that are held once the world, this rank alone, has summed and exchanged values."""
    bound = None if device.type == "cpu" else torch.device("cuda", 0)
    backend = "gloo" if device.type == "cpu" else "nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, device_id=bound)
    try:
        values = torch.ones(ROWS, device=device)
        dist.all_reduce(values)
        dist.all_to_all_single(torch.empty_like(values), values)
        return held_gib(device)
    finally:
        dist.destroy_process_group()


def held_gib(device: torch.device) -> float:
    """Return GiB of the GPU that are taken, less what PyTorch's allocator holds; of a CPU, the process's memory."""
    if device.type == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return (total - free - torch.cuda.memory_reserved(device)) / GIB


if __name__ == "__main__":
    main()
