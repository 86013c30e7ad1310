"""Clusters as data: what a GPU of one computes, holds and moves, each figure with its source. Imports no torch.

A machine without GPUs is a cluster, too: a "GPU" of it is a rank with its share of the cores.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from io import StringIO
from pathlib import Path
from typing import Any, Final, Literal

from attrs import evolve, field, fields, frozen
from attrs.validators import gt, in_, min_len
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap

from moefw.compose.machine import this_machine
from moefw.compose.spec.structure import plain
from moefw.core.errors import PlanError
from moefw.core.site import Machine
from moefw.planner import data_files
from moefw.planner.data_files import SUFFIX, Figure
from moefw.planner.time.likeness import Inputs
from moefw.system.folders import cache_dir

FOLDER: Final = Path(__file__).parent / "clusters"
OWN: Final = "clusters"
"""The folder of the user's own clusters, in the cache."""
THIS_MACHINE: Final = "this-machine"
"""The cluster that `moefw bench calibrate` writes there."""
GIB: Final = 2**30
PEAK_OF: Final[Mapping[str, str]] = {
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "bf16",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
    "float4_e2m1fn_x2": "fp4",
}
"""The peak that products of operands of each dtype have."""


@frozen(kw_only=True)
class Peaks:
    """TFLOPS of dense products of a GPU by the format of operands. None: it does not multiply the format.

    ``fp32``: as PyTorch multiplies by default. It is known where it was measured.
    """

    bf16: Figure
    fp32: Figure | None = None
    fp8: Figure | None = None
    fp4: Figure | None = None


@frozen(kw_only=True)
class Product:
    """A measured product of operands ``(rows, depth)`` and ``(columns, depth)``, in a format of operands."""

    format: Literal["fp32", "bf16", "fp8"]
    rows: int = field(validator=gt(0))
    columns: int = field(validator=gt(0))
    depth: int = field(validator=gt(0))
    tflops: Figure


@frozen(kw_only=True)
class Attention:
    """Measured attention of ``heads`` of ``width``, causal, over sequences of ``keys`` tokens; ``sequences`` of them.

    TFLOPS of the scores that the mask shows, as plans count them: two products in forward, five in backward.
    """

    format: str = field(validator=in_(("fp32", "bf16")))
    sequences: int = field(validator=gt(0))
    heads: int = field(validator=gt(0))
    keys: int = field(validator=gt(0))
    width: int = field(validator=gt(0))
    forward_tflops: Figure
    backward_tflops: Figure

    @property
    def scores(self) -> int:
        """Scores that the mask shows."""
        return self.sequences * self.heads * self.keys * (self.keys + 1) // 2

    @property
    def forward_flops(self) -> int:
        """Operations of forward: scores, and values weighted by them."""
        return 2 * 2 * self.width * self.scores

    @property
    def backward_flops(self) -> int:
        """Operations of backward: the scores once more, and the gradients of both products."""
        return 5 * 2 * self.width * self.scores


@frozen(kw_only=True)
class Pass:
    """TB/s of operators that each read and write ``nbytes``, in the mixture that layers have.

    Their results are allocated, as in training.
    """

    nbytes: int = field(validator=gt(0))
    tb_per_s: Figure


@frozen(kw_only=True)
class Gpu:
    """A GPU. ``names``: what PyTorch calls it; of a rank on a CPU, the processor and the rank's threads.

    ``memory_gib``: what a process can allocate, and the driver holds. ``memory_tb_per_s``: read and written by a copy.
    ``compute_capability``: what it can do, by CUDA's number, such as 9.0. It and ``board_power_w`` are None on a CPU.
    ``threads``: those of a rank on a CPU, which has no host beside it; None: it is a GPU. ``products``, ``dgrads``,
    ``wgrads``, ``attention`` and ``passes`` are known where they were measured.
    """

    names: tuple[str, ...] = field(validator=min_len(1))
    peak_tflops: Peaks
    memory_gib: Figure
    memory_tb_per_s: Figure
    compute_capability: Figure | None = None
    board_power_w: Figure | None = None
    threads: Figure | None = None
    products: tuple[Product, ...] = ()
    dgrads: tuple[Product, ...] = ()
    """Gradients of inputs: of products where they were not measured."""
    wgrads: tuple[Product, ...] = ()
    """Gradients of weights, added to sums in fp32: of products where they were not measured."""
    attention: tuple[Attention, ...] = ()
    passes: tuple[Pass, ...] = ()

    @property
    def capability(self) -> str | None:
        """Compute capability as CUDA spells it; None: unknown, or no GPU."""
        return None if self.compute_capability is None else f"{self.compute_capability.value:.1f}"


@frozen(kw_only=True)
class Collective:
    """A measured collective in which a rank sends ``nbytes`` to others.

    ``us``: what it adds to the time of a rank; ``processor_us``: to that of the rank's processors, of which a rank that
    waits takes none. None: not measured.
    """

    nbytes: int = field(validator=gt(0))
    us: Figure
    processor_us: Figure | None = None


@frozen(kw_only=True)
class Collectives:
    """Collectives of several sizes over all GPUs of a link. Empty: not measured."""

    all_to_all: tuple[Collective, ...] = ()
    all_gather: tuple[Collective, ...] = ()
    reduce_scatter: tuple[Collective, ...] = ()
    all_reduce: tuple[Collective, ...] = ()

    @property
    def without_waits(self) -> Collectives | None:
        """These, taking what they take of processors; None: not all of that was measured."""
        kinds = {kind.name: getattr(self, kind.name) for kind in fields(Collectives)}
        if any(each.processor_us is None for measured in kinds.values() for each in measured):
            return None
        return Collectives(
            **{kind: tuple(evolve(each, us=each.processor_us) for each in measured) for kind, measured in kinds.items()}
        )


@frozen(kw_only=True)
class Link:
    """A link of a GPU. ``gpus``: those that it connects; None: all of the cluster.

    ``gb_per_s``: in each direction; measured, that of two ranks that send to each other, whose small messages take
    ``latency_us``.
    """

    gb_per_s: Figure
    gpus: Figure | None = None
    latency_us: Figure | None = None
    collectives: Collectives = Collectives()


@frozen(kw_only=True)
class HostLink:
    """The link between a GPU and the memory of its host. ``gb_per_s``: of page-locked memory, in each direction.

    It is the slower direction, while all GPUs of the host copy. ``latency_us``: of a copy.
    """

    gb_per_s: Figure
    latency_us: Figure


@frozen(kw_only=True)
class Links:
    """The links of a GPU: inside a node, or a rack that is one node, between nodes, and to its host.

    None: there is none. A rank in the threads of a processor is its own host.
    """

    node: Link | None = None
    network: Link | None = None
    host: HostLink | None = None


@frozen(kw_only=True)
class Checked:
    """A step that was measured on the cluster, and what its figures predicted of it.

    ``layout``: in words. ``inputs``: what other steps are like or unlike in.
    """

    layout: str
    inputs: Inputs
    predicted_ms: float = field(validator=gt(0.0))
    measured_ms: Figure

    @property
    def error(self) -> float:
        """Of the prediction, a share of what was measured."""
        return self.predicted_ms / self.measured_ms.value - 1


@frozen(kw_only=True)
class Cluster:
    """A cluster. What nobody publishes or estimates is left out."""

    about: str
    gpu: Gpu
    links: Links = Links()
    host_launch_us: Figure | None = None
    """Microseconds of the host to launch a kernel: for an operator outside autograd."""
    host_forward_us: Figure | None = None
    """Microseconds of the host for an operator that autograd records."""
    host_backward_us: Figure | None = None
    """Microseconds of the host for an operator of backward, with the node of autograd that calls it."""
    host_layer_us: Figure | None = None
    """Microseconds of the host for an operator in the layers of a model, with all Python around it."""
    host_step_us: Figure | None = None
    """Microseconds of the host for a step of a model with few layers, without its passes."""
    host_layer_of_ranks_us: Figure | None = None
    """As ``host_layer_us``, in the last micro-batch of a step of ranks that train a model together."""
    host_step_of_ranks_us: Figure | None = None
    """As ``host_step_us``, of ranks that train a model together: with the waits for each other."""
    host_cores: Figure | None = None
    """Cores of the host for each GPU."""
    host_memory_gb_per_s: Figure | None = None
    """What the host reads and writes of its memory in a second, for each GPU."""
    usd_per_gpu_hour: Figure | None = None
    checked: tuple[Checked, ...] = ()
    """Small steps of which the figures were checked: their errors are the error bars of predictions."""

    @property
    def is_measured(self) -> bool:
        """Whether what a GPU does in a second was measured, as a calibration does."""
        return bool(self.gpu.products)

    def peak_tflops(self, dtype: str) -> float | None:
        """Peak of products of operands of a dtype, by PyTorch's name; None: there is none."""
        peak: Figure | None = getattr(self.gpu.peak_tflops, PEAK_OF.get(dtype, ""), None)
        return None if peak is None else peak.value

    def machine(self, name: str, device: str) -> Machine:
        """What a spec runs on here that asks for a device. Packages are those of this machine.

        ``name``: the cluster's.
        """
        if self.gpu.threads is not None or device == "cpu":
            return this_machine(device)
        return Machine(device="cuda", capability=self.gpu.capability, name=f"a GPU of {name}")

    @property
    def without_waits(self) -> Cluster | None:
        """This machine as its processors see it: a collective takes as long as it takes of them.

        None: that is unknown, or ranks do not compute in threads.
        """
        if self.gpu.threads is None:
            return None
        links = {}
        for name in ("node", "network"):
            link = getattr(self.links, name)
            collectives = None if link is None else link.collectives.without_waits
            if link is not None and collectives is None:
                return None
            links[name] = None if link is None else evolve(link, collectives=collectives)
        return evolve(self, links=evolve(self.links, **links))

    @property
    def memory_bytes(self) -> int:
        """Bytes of a GPU."""
        return round(self.gpu.memory_gib.value * GIB)


def names() -> list[str]:
    """Names of the clusters that moefw has."""
    return data_files.names(FOLDER)


def own_folder() -> Path:
    """Folder of the user's own clusters. Raises PlanError if the user has no place for a cache."""
    return cache_dir() / OWN


def own_names() -> list[str]:
    """Names of the user's own clusters. One with a name of :func:`names` is not read."""
    try:
        return sorted(path.stem for path in own_folder().glob(f"*{SUFFIX}") if path.stem not in names())
    except PlanError:  # without a place for it, nobody has written one
        return []


def read(name: str) -> Cluster:
    """Cluster of a name, or in a file. Raises SpecError with every problem of the file."""
    own = own_names()
    if name in own:
        return data_files.read_file(Cluster, own_folder() / f"{name}{SUFFIX}", option="--cluster")
    return data_files.read(Cluster, FOLDER, name, option="--cluster", called="cluster", others=own)


def written(cluster: Cluster) -> str:
    """YAML of a cluster, which :func:`read` reads as the same."""
    yaml = YAML()
    yaml.width = 10_000  # a figure is a line, however long its source is
    text = StringIO()
    yaml.dump(_told(plain(cluster)), text)
    return text.getvalue()


def _told(data: Any) -> Any:
    """Plain data without what is left out, each figure on one line."""
    if isinstance(data, list):
        return [_told(item) for item in data]
    if not isinstance(data, dict):
        return data
    told = CommentedMap((key, _told(value)) for key, value in data.items())
    for key, value in [*told.items()]:
        if value in (None, "", [], {}):
            del told[key]
    if "value" in told:
        told.fa.set_flow_style()
    return told


def with_gpu(device_name: str) -> Iterator[tuple[str, Cluster]]:
    """Yield the clusters, with their names, whose GPUs PyTorch calls so: those that moefw has, then the user's own.

    Raises SpecError for a file of the user's own that cannot be read.
    """
    for name in [*names(), *own_names()]:
        cluster = read(name)
        if device_name in cluster.gpu.names:
            yield name, cluster
