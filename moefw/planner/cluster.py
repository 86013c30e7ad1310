"""Clusters as data: what a GPU of one computes, holds and moves, each figure with its source. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from attrs import field, frozen
from attrs.validators import min_len

from moefw.planner import data_files
from moefw.planner.data_files import Figure

FOLDER: Final = Path(__file__).parent / "clusters"
GIB: Final = 2**30
PEAK_OF: Final[Mapping[str, str]] = {
    "bfloat16": "bf16",
    "float16": "bf16",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
    "float4_e2m1fn_x2": "fp4",
}
"""The peak that products of operands of each dtype have."""


@frozen(kw_only=True)
class Peaks:
    """TFLOPS of dense products of a GPU by the format of operands. None: it does not multiply the format."""

    bf16: Figure
    fp8: Figure | None = None
    fp4: Figure | None = None


@frozen(kw_only=True)
class Gpu:
    """A GPU. ``names``: what PyTorch calls it. ``memory_gib``: what a process can allocate, and the driver holds."""

    names: tuple[str, ...] = field(validator=min_len(1))
    peak_tflops: Peaks
    memory_gib: Figure
    memory_tb_per_s: Figure
    board_power_w: Figure


@frozen(kw_only=True)
class Link:
    """A link of a GPU. ``gb_per_s``: in each direction. ``gpus``: those that it connects; None: all of the cluster."""

    gb_per_s: Figure
    gpus: Figure | None = None


@frozen(kw_only=True)
class Links:
    """The links of a GPU: inside a node, or a rack that is one node, and between nodes."""

    node: Link
    network: Link


@frozen(kw_only=True)
class Cluster:
    """A cluster. What nobody publishes or estimates is left out."""

    about: str
    gpu: Gpu
    links: Links
    host_launch_us: Figure | None = None
    """Microseconds of the host to launch a kernel."""
    usd_per_gpu_hour: Figure | None = None

    def peak_tflops(self, dtype: str) -> float | None:
        """Peak of products of operands of a dtype, by PyTorch's name; None: there is none."""
        peak: Figure | None = getattr(self.gpu.peak_tflops, PEAK_OF.get(dtype, ""), None)
        return None if peak is None else peak.value

    @property
    def memory_bytes(self) -> int:
        """Bytes of a GPU."""
        return round(self.gpu.memory_gib.value * GIB)


def names() -> list[str]:
    """Names of the clusters that moefw knows."""
    return data_files.names(FOLDER)


def read(name: str) -> Cluster:
    """Cluster of a name, or in a file. Raises SpecError with every problem of the file."""
    return data_files.read(Cluster, FOLDER, name, option="--cluster", called="cluster")


def with_gpu(device_name: str) -> Iterator[Cluster]:
    """Yield the clusters that moefw knows with GPUs that PyTorch calls so."""
    for name in names():
        cluster = read(name)
        if device_name in cluster.gpu.names:
            yield cluster
