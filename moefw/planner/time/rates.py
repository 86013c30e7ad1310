"""What a cluster does in a second: published shares of its peaks, or what was measured there. Imports no torch."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from math import log
from typing import Final, Protocol, final

from attrs import frozen

from moefw.planner.cluster import PEAK_OF, Attention, Cluster, Link
from moefw.planner.cluster import Product as Measured
from moefw.planner.data_files import Figure
from moefw.planner.report import AGAIN, Product
from moefw.planner.time.figures import Figures
from moefw.planner.time.least_squares import costs_of
from moefw.planner.time.nodes import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, Route
from moefw.planner.time.software import Software

TERA: Final = 1e12
GIGA: Final = 1e9
MICRO: Final = 1e-6
ITEMSIZE: Final[Mapping[str, float]] = {"bf16": 2.0, "fp8": 1.0, "fp4": 0.5}
"""Bytes of a value of each format that published shares are of."""
WIDER: Final = ("fp4", "fp8", "bf16", "fp32")
"""Formats of operands, each wider than the last."""
COLLECTIVE_OF: Final[Mapping[str, str]] = {
    ALL_TO_ALL: "all_to_all",
    ALL_GATHER: "all_gather",
    REDUCE_SCATTER: "reduce_scatter",
    ALL_REDUCE: "all_reduce",
}
"""The measured collective of a kind of transfer; others are messages."""


class Rates(Protocol):
    """Seconds of each kind of work, without what was fitted."""

    def attention(self, product: Product) -> float:
        """Seconds of products of attention's core."""

    def product(self, product: Product, *, is_grouped: bool) -> float:
        """Seconds of products. ``is_grouped``: of experts, each with some of the rows."""

    def passes(self, nbytes: float, operators: float) -> float:
        """Seconds of ``operators`` that together read and write so many bytes."""

    def update(self, nbytes: float, operators: float) -> float:
        """The same of operators that end a step, of which some read and write all states of the optimizer."""

    def move(self, kind: str, route: Route, dispatcher: str) -> float:
        """Seconds of the links for one transfer of a kind.

        The cluster has the links on which anything is sent. ``dispatcher``: the one that sends rows of experts.
        """

    def movement(self, node: float, network: float, dispatcher: str) -> float:
        """Seconds of the links for a movement of a dispatcher that sends so many bytes."""

    def copies_over_host_link(self, nbytes: float, copies: float) -> float:
        """Seconds of so many copies one way between a GPU and its host, which the cluster has a link for."""

    def update_on_host(self, nbytes: float) -> float:
        """Seconds of the host for an update that reads and writes so many bytes of its memory."""


def rates_of(cluster: Cluster, software: Software, figures: Figures) -> Rates:
    """Rates of a cluster: what was measured there, if anything was."""
    return MeasuredRates(cluster, figures) if cluster.is_measured else PublishedRates(cluster, software, figures)


@final
@frozen
class PublishedRates(Rates):
    """Shares of a GPU's peaks that were published for its generation."""

    cluster: Cluster
    software: Software
    figures: Figures

    def attention(self, product: Product) -> float:
        """See :class:`Rates`."""
        generation = self.figures.generation(self.cluster)
        share = generation.attention_forward if product.during == "fprop" else generation.attention_backward
        faster = self.figures.attention_fp8_times.value if self.software.fp8_attention else 1.0
        return product.flops / (self._bf16 * share.value * faster)

    def product(self, product: Product, *, is_grouped: bool) -> float:
        """See :class:`Rates`."""
        kind, peak = self._peak(product.dtype)
        if not kind:
            return product.flops / (self._bf16 * self.figures.fp32_share.value)
        rate = peak * self._share(product, kind, is_grouped=is_grouped)
        multiplied = product.flops / (rate * self._tile_efficiency(product, rate))
        moved = product.times * _operands(product, ITEMSIZE[kind]) / self._memory(self.figures.passes.value)
        return max(multiplied, moved)

    def passes(self, nbytes: float, operators: float) -> float:
        """See :class:`Rates`."""
        return nbytes / self._memory(self.figures.passes.value)

    def update(self, nbytes: float, operators: float) -> float:
        """See :class:`Rates`."""
        return nbytes / self._memory(self.figures.optimizer_pass.value)

    def move(self, kind: str, route: Route, dispatcher: str) -> float:
        """See :class:`Rates`."""
        node, network = route.node, route.network
        if kind == ALL_REDUCE:
            # Counted is the tensor to each peer; a ring sends twice its part to the next rank.
            node, network = 2 * node / route.inside, 2 * network / route.nodes
        return self.movement(node, network, dispatcher if kind == ALL_TO_ALL else "collectives")

    def movement(self, node: float, network: float, dispatcher: str) -> float:
        """See :class:`Rates`."""
        shares = self.figures.transfers
        links = self.cluster.links
        on_node = _published(links.node, node, shares.node, dispatcher)
        on_network = _published(links.network, network, shares.network, dispatcher)
        return max(on_node, on_network) + shares.latency_us.value * MICRO

    def copies_over_host_link(self, nbytes: float, copies: float) -> float:
        """See :class:`Rates`."""
        return _over_host_link(self.cluster, nbytes, copies)

    def update_on_host(self, nbytes: float) -> float:
        """See :class:`Rates`."""
        return nbytes / (_host_memory(self.cluster) * self.figures.optimizer_pass.value)

    @property
    def _bf16(self) -> float:
        """Operations a second at the peak of bf16."""
        return self.cluster.gpu.peak_tflops.bf16.value * TERA

    def _memory(self, share: float) -> float:
        """Bytes a second."""
        return self.cluster.gpu.memory_tb_per_s.value * TERA * share

    def _peak(self, dtype: str) -> tuple[str, float]:
        """Format in which operands of a dtype are multiplied, and operations a second; empty: none with shares."""
        kind = PEAK_OF.get(dtype, "")
        if kind not in ITEMSIZE:
            return "", 0.0
        figure: Figure | None = getattr(self.cluster.gpu.peak_tflops, kind)
        assert figure is not None, "the cluster lacks no figure"
        return kind, figure.value * TERA

    def _share(self, product: Product, kind: str, *, is_grouped: bool) -> float:
        """Share of its peak that a product with endless sums reaches."""
        generation = self.figures.generation(self.cluster)
        rows, _, summed = product.shape
        share: float = getattr(generation, f"{'grouped' if is_grouped else 'dense'}_{kind}").value
        if is_grouped:
            if product.during == "wgrad":
                share *= getattr(generation, f"grouped_wgrad_{kind}").value
            # A group of rows ends inside a tile: half a tile is multiplied in vain.
            of_group = (summed if product.during == "wgrad" else rows) / product.groups
            share *= of_group / (of_group + self.figures.tile_rows.value / 2)
        return share

    def _tile_efficiency(self, product: Product, rate: float) -> float:
        """Share of its rate with endless sums that a product reaches: each tile takes a while to begin and to end."""
        summed = product.shape[2] / (product.groups if product.during == "wgrad" else 1)
        return summed / (summed + self.figures.tile_overhead.value * rate / TERA)


def _over_host_link(cluster: Cluster, nbytes: float, copies: float) -> float:
    """Seconds of copies over the link between a GPU and its host."""
    link = cluster.links.host
    assert link is not None, "the cluster lacks no link"
    return nbytes / (link.gb_per_s.value * GIGA) + copies * link.latency_us.value * MICRO


def _host_memory(cluster: Cluster) -> float:
    """Bytes a second of the host's memory for each GPU."""
    assert cluster.host_memory_gb_per_s is not None, "the cluster lacks no figure"
    return cluster.host_memory_gb_per_s.value * GIGA


def _published(link: Link | None, nbytes: float, shares: Mapping[str, object], name: str) -> float:
    """Seconds of a link for so many bytes, at the share of its rate that was published."""
    if not nbytes:
        return 0.0
    assert link is not None, "the cluster lacks no link"
    share = shares.get(name, shares["collectives"])
    return nbytes / (link.gb_per_s.value * GIGA * share.value)  # type: ignore[attr-defined,no-any-return]


def _operands(product: Product, itemsize: float) -> float:
    """Bytes of the operands of a product, and of its result: in bf16, or, for weights, in fp32."""
    rows, columns, summed = product.shape
    if product.during == "wgrad":
        return itemsize * summed * (rows + columns) + 4.0 * product.groups * rows * columns
    return itemsize * (rows * summed + product.groups * summed * columns) + 2.0 * rows * columns


@final
@frozen(slots=False)
class MeasuredRates(Rates):
    """What a calibration measured, and what follows for other shapes and sizes."""

    cluster: Cluster
    figures: Figures

    def attention(self, product: Product) -> float:
        """See :class:`Rates`. Each score costs a time, and so do the operations of its products."""
        score_s, flop_s = self._attention[_format(product.dtype, self._attention)][product.during != "fprop"]
        rows, columns, _ = product.shape
        scores = rows * columns if product.scores is None else product.scores
        if product.during == AGAIN:  # the same scores once more: those of the gradients count
            scores = 0
        return score_s * product.times * scores + flop_s * product.flops

    def product(self, product: Product, *, is_grouped: bool) -> float:
        """See :class:`Rates`. The call of a product costs a time, and so do its operations and its values."""
        format = _format(product.dtype, self._products)
        costs = self._products[format]
        if product.during in self._gradients:
            costs = self._gradients[product.during].get(format, costs)
        call_s, flop_s, value_s = costs
        rows, columns, summed = product.shape
        groups = product.groups
        if product.during == "wgrad":
            values = summed * (rows + columns) + groups * rows * columns
        else:
            values = rows * (summed + columns) + groups * summed * columns
        return flop_s * product.flops + product.times * (call_s * groups + value_s * values)

    def passes(self, nbytes: float, operators: float) -> float:
        """See :class:`Rates`. What an operator reads and writes decides whether caches hold it."""
        return nbytes / self._memory(nbytes / max(1.0, operators)) if nbytes else 0.0

    def update(self, nbytes: float, operators: float) -> float:
        """See :class:`Rates`. Here no operator differs from those of a pass."""
        return self.passes(nbytes, operators)

    def move(self, kind: str, route: Route, dispatcher: str) -> float:
        """See :class:`Rates`."""
        return self._links(COLLECTIVE_OF.get(kind, ""), route.node, route.network)

    def movement(self, node: float, network: float, dispatcher: str) -> float:
        """See :class:`Rates`."""
        return self._links("all_to_all", node, network)

    def copies_over_host_link(self, nbytes: float, copies: float) -> float:
        """See :class:`Rates`. A rank in threads copies in its own memory, where it reads and writes."""
        if self.cluster.gpu.threads is not None:
            return self.passes(2 * nbytes, copies)
        return _over_host_link(self.cluster, nbytes, copies)

    def update_on_host(self, nbytes: float) -> float:
        """See :class:`Rates`. A rank in threads is its own host."""
        if self.cluster.gpu.threads is not None:
            return self.passes(nbytes, 1)
        return nbytes / _host_memory(self.cluster)

    @cached_property
    def _products(self) -> Mapping[str, tuple[float, ...]]:
        return _costs_of_products(self.cluster.gpu.products)

    @cached_property
    def _gradients(self) -> Mapping[str, Mapping[str, tuple[float, ...]]]:
        """Costs of gradients, by what they are for and by format."""
        gpu = self.cluster.gpu
        return {"dgrad": _costs_of_products(gpu.dgrads), "wgrad": _costs_of_products(gpu.wgrads)}

    @cached_property
    def _attention(self) -> Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]]:
        """Seconds of a score and of an operation, in forward and in backward, by format."""
        of_format: dict[str, list[Attention]] = {}
        for each in self.cluster.gpu.attention:
            of_format.setdefault(each.format, []).append(each)
        return {
            format: (
                costs_of(
                    [[each.scores, each.forward_flops] for each in shapes],
                    [each.forward_flops / (each.forward_tflops.value * TERA) for each in shapes],
                ),
                costs_of(
                    [[each.scores, each.backward_flops] for each in shapes],
                    [each.backward_flops / (each.backward_tflops.value * TERA) for each in shapes],
                ),
            )
            for format, shapes in of_format.items()
        }

    def _memory(self, nbytes: float) -> float:
        """Bytes a second of operators that read and write so many: of both on a line between measured sizes' logs."""
        known = sorted((each.nbytes, each.tb_per_s.value * TERA) for each in self.cluster.gpu.passes)
        smaller = max((each for each in known if each[0] <= nbytes), default=known[0])
        larger = min((each for each in known if each[0] >= nbytes), default=known[-1])
        if smaller[0] == larger[0]:
            return smaller[1]
        share = log(nbytes / smaller[0]) / log(larger[0] / smaller[0])
        rate: float = smaller[1] * (larger[1] / smaller[1]) ** share
        return rate

    def _links(self, collective: str, node: float, network: float) -> float:
        """Seconds of both links side by side for so many bytes."""
        links = self.cluster.links
        return max(self._link(links.node, collective, node), self._link(links.network, collective, network))

    def _link(self, link: Link | None, collective: str, nbytes: float) -> float:
        """Seconds of a link for so many bytes in a collective, or as messages where it was not measured."""
        if not nbytes:
            return 0.0
        assert link is not None, "the cluster lacks no link"
        measured = getattr(link.collectives, collective, ())
        if measured:
            return MICRO * _microseconds(sorted((each.nbytes, each.us.value) for each in measured), nbytes)
        latency_us = self.figures.transfers.latency_us if link.latency_us is None else link.latency_us
        return nbytes / (link.gb_per_s.value * GIGA) + latency_us.value * MICRO


def _microseconds(measured: Sequence[tuple[int, float]], nbytes: float) -> float:
    """Microseconds of a collective of so many bytes: on a line between measured sizes, and at the rate of the largest.

    ``measured``: bytes and microseconds, in order. Smaller ones than the smallest take as long.
    """
    if nbytes <= measured[0][0]:
        return measured[0][1]
    for (less, less_us), (more, more_us) in pairwise(measured):
        if nbytes <= more:
            return less_us + (more_us - less_us) * (nbytes - less) / (more - less)
    largest, largest_us = measured[-1]
    return largest_us * nbytes / largest


def _costs_of_products(products: Iterable[Measured]) -> Mapping[str, tuple[float, ...]]:
    """Seconds of a call, of an operation and of a value, of products of each format."""
    of_format: dict[str, list[tuple[list[float], float]]] = {}
    for each in products:
        flops = 2.0 * each.rows * each.columns * each.depth
        values = float(each.rows * (each.depth + each.columns) + each.depth * each.columns)
        of_format.setdefault(each.format, []).append(([1.0, flops, values], flops / (each.tflops.value * TERA)))
    return {format: costs_of(*zip(*measured, strict=True)) for format, measured in of_format.items()}


def format_of(dtype: str, measured: Container[str]) -> str | None:
    """Format in which operands of a dtype are multiplied, of those that were measured: its own, or a wider one.

    None: neither was measured.
    """
    own = PEAK_OF.get(dtype, WIDER[-1])
    return next((format for format in WIDER[WIDER.index(own) :] if format in measured), None)


def _format(dtype: str, measured: Container[str]) -> str:
    format = format_of(dtype, measured)
    assert format is not None, "the cluster lacks no figure"
    return format
