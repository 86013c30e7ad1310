"""The cluster that readings describe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from attrs import asdict, evolve, frozen

from moefw.core.errors import Problem, RunError
from moefw.planner.calibration.alone import (
    BACKWARD,
    COPY,
    DTYPES,
    FORWARD,
    FROM_HOST,
    HOST_COPY,
    LAUNCH,
    LAYER,
    LAYER_OF_RANKS,
    OPERATORS_OF_PASSES,
    PHASES,
    SMALL_TO_HOST,
    STEP,
    STEP_OF_RANKS,
    TO_HOST,
    Heads,
    Shape,
    Sizes,
    attention_name,
    bytes_of_passes,
    dgrad_name,
    pass_name,
    product_name,
    wgrad_name,
)
from moefw.planner.calibration.links import COLLECTIVES, MESSAGES, SIZES, bytes_sent, link_name, processor_name
from moefw.planner.calibration.ranks import Readings, said_of
from moefw.planner.calibration.readings import Reading
from moefw.planner.cluster import (
    GIB,
    Attention,
    Cluster,
    Collective,
    Collectives,
    Gpu,
    HostLink,
    Link,
    Links,
    Pass,
    Peaks,
    Product,
)
from moefw.planner.data_files import Figure

DIGITS: Final = 4
FORMATS: Final = ("fp32", "bf16", "fp8")


@frozen(kw_only=True)
class Surroundings:
    """What is known without a measurement of time.

    ``name``: what a run calls the GPU, or the processor and its threads. ``memory_bytes``, ``cores``: for each rank.
    ``capability``: the compute capability; it and ``board_power_w`` None: unknown. ``threads``: of a rank on a CPU;
    None: on a GPU. ``ranks``: by link, how many reach each other. ``message_bytes``: of a large message.
    """

    about: str
    name: str
    memory_bytes: int
    cores: int
    capability: float | None
    board_power_w: float | None
    threads: int | None
    ranks: dict[str, int]
    message_bytes: int


def cluster_of(readings: Readings, around: Surroundings, *, sizes: Sizes, by: str) -> Cluster:
    """Cluster of the readings, with figures that say ``by`` whom. What was not measured is left out.

    Raises RunError with every failure if one of them is of what a cluster cannot do without: products of bf16, and the
    copy.
    """
    figures = _Figures(readings, by)
    products = figures.products(sizes.shapes)
    peaks = {format: figures.peak(products, format) for format in FORMATS}
    copy = figures.named(COPY)
    if peaks["bf16"] is None or copy is None:
        raise RunError(
            [
                Problem(f"{name} could not be measured: {reason}.", "A cluster is of nothing without it.")
                for name, reason in readings.failed.items()
            ]
        )
    gpu = Gpu(
        names=(around.name,),
        peak_tflops=Peaks(bf16=peaks["bf16"], fp32=peaks["fp32"], fp8=peaks["fp8"]),
        memory_gib=figures.read(around.memory_bytes / GIB),
        memory_tb_per_s=copy,
        compute_capability=figures.read_if_known(around.capability),
        board_power_w=figures.read_if_known(around.board_power_w),
        threads=figures.read_if_known(around.threads),
        products=products,
        dgrads=figures.dgrads(sizes.shapes_of_dgrads),
        wgrads=figures.wgrads(sizes.shapes),
        attention=figures.attention(sizes.heads),
        passes=figures.passes(sizes.operands),
    )
    links = {link: figures.link(link, ranks, around.message_bytes) for link, ranks in around.ranks.items()}
    return Cluster(
        about=around.about,
        gpu=gpu,
        links=Links(node=links.get("node"), network=links.get("network"), host=figures.host_link()),
        host_launch_us=figures.named(LAUNCH),
        host_forward_us=figures.named(FORWARD),
        host_backward_us=figures.named(BACKWARD),
        host_layer_us=figures.named(LAYER),
        host_step_us=figures.named(STEP),
        host_layer_of_ranks_us=figures.named(LAYER_OF_RANKS),
        host_step_of_ranks_us=figures.named(STEP_OF_RANKS),
        host_cores=figures.read(around.cores),
        host_memory_gb_per_s=figures.named(HOST_COPY),
    )


def measured_by(version: str, date: str) -> str:
    """Who measured figures, and when, as their sources say it."""
    return f"measured by moefw {version} on {date}"


class _Figures:
    """Figures of readings, with their source."""

    def __init__(self, readings: Readings, by: str) -> None:
        self._readings = readings
        self._by = by

    def read(self, value: float) -> Figure:
        """Figure of what the system says."""
        return Figure(value=_rounded(value), source=f"{self._by}: the system says so")

    def read_if_known(self, value: float | None) -> Figure | None:
        """The same; None if the system does not say it."""
        return None if value is None else self.read(value)

    def named(self, name: str) -> Figure | None:
        """Figure of a measurement; None if it failed or was not made."""
        reading = self._readings.of.get(name)
        return None if reading is None else self._measured(reading)

    def products(self, shapes: Sequence[Shape]) -> tuple[Product, ...]:
        """Every product that was measured."""
        return self._products(product_name, shapes)

    def dgrads(self, shapes: Sequence[Shape]) -> tuple[Product, ...]:
        """Every gradient of inputs that was measured. ``shapes``: of the products with these inputs."""
        return self._products(dgrad_name, [shape.of_input_gradient() for shape in shapes])

    def wgrads(self, shapes: Sequence[Shape]) -> tuple[Product, ...]:
        """Every gradient of weights that was measured. ``shapes``: of the products with these weights."""
        return self._products(wgrad_name, [shape.of_gradient() for shape in shapes])

    def _products(self, name: Callable[[str, Shape], str], shapes: Sequence[Shape]) -> tuple[Product, ...]:
        found = []
        for format in FORMATS:
            for shape in shapes:
                tflops = self.named(name(format, shape))
                if tflops is not None:
                    found.append(
                        Product(format=format, rows=shape.rows, columns=shape.columns, depth=shape.depth, tflops=tflops)
                    )
        return tuple(found)

    def attention(self, shapes: Sequence[Heads]) -> tuple[Attention, ...]:
        """Attention of every format and shape that was measured in both phases."""
        found = []
        for format in DTYPES:
            for heads in shapes:
                forward, backward = (self.named(attention_name(format, heads, phase)) for phase in PHASES)
                if forward is not None and backward is not None:
                    found.append(
                        Attention(format=format, **asdict(heads), forward_tflops=forward, backward_tflops=backward)
                    )
        return tuple(found)

    def passes(self, operands: Sequence[int]) -> tuple[Pass, ...]:
        """Passes over tensors of every size that was measured."""
        found = []
        for nbytes in operands:
            rate = self.named(pass_name(nbytes))
            if rate is not None:
                found.append(Pass(nbytes=bytes_of_passes(nbytes) // OPERATORS_OF_PASSES, tb_per_s=rate))
        return tuple(found)

    def peak(self, products: Sequence[Product], format: str) -> Figure | None:
        """Figure of the fastest product of a format; None if none was measured."""
        of_format = [product for product in products if product.format == format]
        if not of_format:
            return None
        fastest = max(of_format, key=lambda product: product.tflops.value)
        shape = f"{fastest.rows} x {fastest.columns} x {fastest.depth}"
        return evolve(fastest.tflops, source=f"{fastest.tflops.source}, {shape}, the fastest")

    def link(self, link: str, ranks: int, nbytes: int) -> Link | None:
        """A link that connects ``ranks``; None if not even messages could be measured.

        ``nbytes``: of a large message.
        """
        gb_per_s = self.named(link_name(link, MESSAGES, "large"))
        if gb_per_s is None:
            return None
        collectives = {kind: self._collectives(link, kind, ranks, nbytes) for kind in COLLECTIVES}
        return Link(
            gb_per_s=gb_per_s,
            gpus=self.read(ranks) if link == "node" else None,
            latency_us=self.named(link_name(link, MESSAGES, "small")),
            collectives=Collectives(**collectives),
        )

    def host_link(self) -> HostLink | None:
        """The link between a GPU and its host, at the rate of its slower direction; None if it was not measured."""
        out, back, latency = map(self.named, (TO_HOST, FROM_HOST, SMALL_TO_HOST))
        if out is None or back is None or latency is None:
            return None
        return HostLink(gb_per_s=min(out, back, key=lambda figure: figure.value), latency_us=latency)

    def _collectives(self, link: str, kind: str, ranks: int, nbytes: int) -> tuple[Collective, ...]:
        """A collective of every size that was measured, with what it takes of processors where that was, too."""
        found = []
        for size in SIZES:
            us = self.named(link_name(link, kind, size))
            if us is not None:
                sent = bytes_sent(kind, ranks, nbytes, size)
                found.append(Collective(nbytes=sent, us=us, processor_us=self.named(processor_name(link, kind, size))))
        return tuple(found)

    def _measured(self, reading: Reading) -> Figure:
        return figure_of(reading, self._by)


def figure_of(reading: Reading, by: str) -> Figure:
    """Figure of a reading. ``by``: who measured it."""
    return Figure(value=_rounded(reading.value), source=f"{by}, {said_of(reading)}")


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
