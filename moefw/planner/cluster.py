"""Clusters as data: what a GPU of one computes, holds and moves, each figure with its source. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from attrs import Attribute, field, frozen
from attrs.validators import gt, min_len

from moefw.compose.spec.source import Marks, read_yaml
from moefw.compose.spec.structure import structure
from moefw.core.errors import Problem, SpecError, nearest, os_reason

FOLDER: Final = Path(__file__).parent / "clusters"
SUFFIX: Final = ".yaml"
GIB: Final = 2**30
PEAK_OF: Final[Mapping[str, str]] = {
    "bfloat16": "bf16",
    "float16": "bf16",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
    "float4_e2m1fn_x2": "fp4",
}
"""The peak that products of operands of each dtype have."""


def _one_of_both(figure: Figure, _: Attribute[str], value: str) -> None:
    if bool(value) is bool(figure.source):
        raise ValueError("a figure has either a source, or estimated: how it was estimated.")


@frozen(kw_only=True)
class Figure:
    """A number, and where it was published, or how it was estimated where nobody publishes it."""

    value: float = field(validator=gt(0.0))
    source: str = ""
    estimated: str = field(default="", validator=_one_of_both)


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
    return sorted(path.stem for path in FOLDER.glob(f"*{SUFFIX}"))


def read(name: str) -> Cluster:
    """Cluster of a name, or in a file. Raises SpecError with every problem of the file."""
    path = FOLDER / f"{name}{SUFFIX}"
    if name not in names():
        path = Path(name)
        if path.suffix != SUFFIX:
            raise SpecError(
                f"--cluster {name}: no cluster is called so.", f"{nearest(name, names())} Or name a {SUFFIX} file."
            )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = os_reason(error) if isinstance(error, OSError) else "it is no text"
        raise SpecError(f"--cluster {path}: {reason}.", "Name a file that can be read.") from error
    marks = Marks(path.name)
    problems: list[Problem] = []
    tree = read_yaml(text, marks, problems)
    cluster = structure(Cluster, tree, (), marks, problems)
    if problems or cluster is None:
        raise SpecError(problems)
    return cluster


def with_gpu(device_name: str) -> Iterator[Cluster]:
    """Yield the clusters that moefw knows with GPUs that PyTorch calls so."""
    for name in names():
        cluster = read(name)
        if device_name in cluster.gpu.names:
            yield cluster
