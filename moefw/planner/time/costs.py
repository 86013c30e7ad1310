"""Seconds of the work of a plan on a GPU, by category, and the launches of its host. Imports no torch.

All seconds here are those of the figures with their sources; :mod:`moefw.planner.time.scale` has what was fitted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import comb
from operator import attrgetter
from typing import Final

from attrs import evolve, field, fields, frozen

from moefw.planner.cluster import PEAK_OF, Cluster
from moefw.planner.report import OnHost, Product, Transfer, Work
from moefw.planner.time.figures import Figures
from moefw.planner.time.nodes import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, SEND, Nodes, Route
from moefw.planner.time.rates import ITEMSIZE, Rates, rates_of
from moefw.planner.time.software import Implementation, Kernels, Offloaded, Region, Software

EXPERT_REGIONS: Final = ("layer", "dispatch")
"""Regions whose transfers are those of dispatchers."""
DISPATCH: Final = "dispatch"
ROWS_OF_EXPERTS: Final = "expert_"
"""How regions are called in which experts multiply their rows."""
ATTENTION: Final = "core_attn"
OUTSIDE: Final = "outside"
IN_8_BITS: Final = "float8_e4m3fn"
"""The dtype of products of 16 bits that software multiplies in 8."""
NO_KERNELS: Final = Kernels()
NO_REGION: Final = Region()
FP32: Final = 4.0
"""Bytes of a value that is in none of the formats with a share of their own."""


@frozen(kw_only=True)
class Shapes:
    """What of a model and its layout decides the volume of dispatchers.

    ``tokens``: of the residual stream of a rank in a micro-batch. ``etp``: ranks that share an expert. ``groups`` and
    ``top_groups``: a token's experts are in ``top_groups`` of so many groups; 1: anywhere. ``skew``: rows of the rank
    with most beside the mean; 1: forced balance. ``room``: rows that a plan has for each rank beside the mean, if they
    are static. ``itemsize``: bytes of a value that is sent to experts.

    ``in_library``: whether a library moves rows, once to each node, over both links at once. ``is_static``: whether as
    much is sent whatever the routing.
    """

    tokens: int
    hidden: int
    experts: int
    top_k: int
    ep: int
    dispatcher: str
    etp: int = 1
    groups: int = 1
    top_groups: int = 1
    skew: float = 1.0
    room: float = 1.0
    itemsize: float = 2.0
    in_library: bool = False
    is_static: bool = False

    @property
    def more_rows(self) -> float:
        """Rows of the rank with most beside those that a plan has."""
        return max(1.0, self.skew / self.room)


@frozen(kw_only=True, cache_hash=True)
class Spent:
    """Seconds of the GPU by category, launches of the host, and kernels of CUDA graphs. ``wgrad``: of the products.

    ``expert_transfers`` and ``tensor_transfers``: of links, inside of layers. ``gathers``: of weights and of sums of
    gradients in a micro-batch, beside which it computes. ``send``: to the next stage. ``stores`` and ``fetches``: of
    the link to the host, to its memory and from it; ``unhidden``: of both, what nothing hides.
    """

    products: float = 0.0
    experts: float = 0.0
    attention: float = 0.0
    passes: float = 0.0
    expert_transfers: float = 0.0
    tensor_transfers: float = 0.0
    gathers: float = 0.0
    send: float = 0.0
    stores: float = 0.0
    fetches: float = 0.0
    unhidden: float = 0.0
    launches: float = 0.0
    graphed: float = 0.0
    wgrad: float = 0.0

    @property
    def kernels(self) -> float:
        """Kernels, launched by the host or by a graph: the GPU pauses between two of them in any case."""
        return self.launches + self.graphed

    def plus(self, other: Spent, times: float = 1.0) -> Spent:
        """Sum of this and ``times`` the other."""
        sums = (own + times * more for own, more in zip(VALUES(self), VALUES(other), strict=True))
        return Spent(**dict(zip(NAMES, sums, strict=True)))

    def times(self, factor: float) -> Spent:
        """This, so many times."""
        return Spent().plus(self, factor)


NAMES: Final = tuple(each.name for each in fields(Spent))
VALUES: Final = attrgetter(*NAMES)
"""The values of what is spent, in the order of their names."""


def is_attention(product: Product, region: str) -> bool:
    """Whether a product is one of attention's core."""
    return product.scores is not None or region == ATTENTION


def distinct(places: int, total: int, chosen: int) -> float:
    """Expected number of ``places``, each with its part of ``total`` experts, that ``chosen`` of them lie in."""
    part = total // places
    return places * (1 - comb(total - part, chosen) / comb(total, chosen))


def places_of_token(shapes: Shapes, places: int) -> float:
    """Expected number of ranks, or of nodes, to which a token goes, if experts are spread over so many."""
    if shapes.top_groups >= shapes.groups or places <= 1:
        return distinct(places, shapes.experts, shapes.top_k)
    pool = shapes.experts * shapes.top_groups // shapes.groups
    inside = max(1, places * shapes.top_groups // shapes.groups)
    if places < shapes.groups:
        # Each place has several groups: those that the chosen groups lie in, if a token uses all of them.
        return distinct(places, shapes.groups, shapes.top_groups)
    return distinct(inside, pool, shapes.top_k)


@frozen
class Costs:
    """Costs of work on a cluster, with software."""

    cluster: Cluster
    implementation: Implementation
    software: Software
    shapes: Shapes
    figures: Figures
    nodes: Nodes
    rates: Rates = field(init=False)

    @rates.default
    def _rates(self) -> Rates:
        return rates_of(self.cluster, self.software, self.figures)

    def in_formats(self, work: Sequence[Work]) -> Sequence[Work]:
        """Work of a position in the formats in which the software multiplies."""
        if not self.software.fp8_head:
            return work
        return [_in_8_bits(each) if each.region == OUTSIDE else each for each in work]

    def of(self, work: Work) -> Spent:
        """What one layer of this work spends in a pass."""
        kernels = self._kernels(work)
        seconds = dict.fromkeys(("products", "experts", "attention"), 0.0)
        wgrad = 0.0
        for product in work.products:
            category, spent = self._product(product, work.region)
            seconds[category] += spent
            if product.during == "wgrad":
                wgrad += spent
        launches, graphed = self._launches(work, kernels)
        passes = self.rates.passes(self._bytes(work, kernels), work.operators)
        experts, tensor, gathers, send = self._transfers(work)
        stores, fetches = self.over_host_link(work)
        return Spent(
            **seconds,
            passes=passes,
            expert_transfers=experts,
            tensor_transfers=tensor,
            gathers=gathers,
            send=send,
            stores=stores,
            fetches=fetches,
            unhidden=self._unhidden * (stores + fetches),
            launches=launches,
            graphed=graphed,
            wgrad=wgrad,
        )

    def once(self, work: Sequence[Work]) -> float:
        """Seconds of a position for what a step does once: the update, and passes over weights and gradients."""
        updates = sum(each.layers * self._update(each) for each in work if each.phase == "optimizer")
        software = self.implementation.once
        if software is None:
            return updates + sum(each.layers * self._measured(each) for each in work if each.phase == "once")
        return updates + self.rates.update(software.quantized * quantized_weights(work), 1)

    def _update(self, work: Work) -> float:
        """Seconds of an update: of the software's own kernel, if it has one, and each element is updated on the GPU."""
        software = self.implementation.once
        if software is None or not work.updated.parameters or work.on_host.nbytes:
            return self._measured(work)
        return self.rates.update(software.updated * work.updated.parameters + 2 * work.updated.states, 1)

    def _measured(self, work: Work) -> float:
        """Seconds of passes over memory and products, as a plan has measured them."""
        spent = self.of(work)
        return spent.products + spent.experts + self.rates.update(work.nbytes, work.operators)

    def over_host_link(self, work: Work) -> tuple[float, float]:
        """Seconds of the link to the host for one layer: to its memory, and from it."""
        on_host = self._on_host(work)
        directions = (on_host.out > 0) + (on_host.back > 0)
        copies = on_host.copies / max(1, directions)
        out = self.rates.copies_over_host_link(on_host.out, copies) if on_host.out else 0.0
        back = self.rates.copies_over_host_link(on_host.back, copies) if on_host.back else 0.0
        return out, back

    @property
    def _unhidden(self) -> float:
        """Share of copies to the host and back that nothing hides."""
        exposed = self.implementation.offload_exposed
        return 0.0 if exposed is None else exposed.value

    def update_on_host(self, work: Work) -> float:
        """Seconds of the host for what its operators read and write."""
        nbytes = work.on_host.nbytes
        return self.rates.update_on_host(nbytes) if nbytes else 0.0

    def _on_host(self, work: Work) -> OnHost:
        """What goes over the link to the host: as the plan has it, or as the software offloads modules."""
        if not self.software.offload or work.phase in ("once", "optimizer"):
            return work.on_host
        modules = [self.implementation.offloads[name] for name in self.software.offload]
        own = [module for module in modules if module.region == work.region]
        if not own or work.phase == "recompute":
            return OnHost()
        nbytes = sum(self._offloaded(module, work) for module in own)
        if work.phase == "forward":
            return OnHost(copies=len(own), out=round(nbytes))
        return OnHost(copies=len(own), back=round(nbytes))

    def _offloaded(self, module: Offloaded, work: Work) -> float:
        """Bytes that a module of one layer copies to host memory."""
        stream = self.shapes.tokens * self.shapes.hidden
        skew = self.shapes.skew if work.region.startswith("expert") else 1.0
        _, returned, _ = _values(work)
        operands = _operand_bytes(work) if module.operands else 0.0
        return module.stream * stream + skew * (module.outputs * returned + operands)

    def sums(self, work: Iterable[Work]) -> float:
        """Seconds of links for the sums of gradients over ranks, and the gathers of updated weights."""
        planned = [(each.layers, transfer) for each in work for transfer in each.transfers]
        return sum(layers * self._move(transfer) for layers, transfer in self._once(planned))

    def _once(self, planned: Sequence[tuple[int, Transfer]]) -> Iterator[tuple[int, Transfer]]:
        """Yield transfers of a step, each with its layers, as the software has them.

        Where gradients are summed once, it gathers as many weights, whatever the plan gathers them as.
        """
        software = self.implementation.once
        has_sums = any(transfer.kind == REDUCE_SCATTER for _, transfer in planned)
        for layers, transfer in planned:
            if software is None or transfer.kind != ALL_GATHER or not has_sums:
                yield layers, self._summed(transfer)
            if software is not None and transfer.kind == REDUCE_SCATTER:
                yield layers, evolve(transfer.larger(software.weight / FP32), kind=ALL_GATHER)

    def _summed(self, transfer: Transfer) -> Transfer:
        """A transfer of gradients, which plans count in fp32, with those of the software."""
        software = self.implementation.once
        if software is None or transfer.kind not in (REDUCE_SCATTER, ALL_REDUCE):
            return transfer
        return transfer.larger(software.gradient / FP32)

    def _kernels(self, work: Work) -> Region | None:
        """Region of the implementation; None: as measured."""
        regions = self.implementation.regions
        if not regions:
            return None
        if self.software.fused_grouped_mlp and work.region in self.implementation.fused_grouped_mlp:
            return self.implementation.fused_grouped_mlp[work.region]
        return regions.get(work.region, NO_REGION)

    def _kernels_of_dispatcher(self, work: Work) -> Kernels:
        """What the dispatcher adds to its region."""
        region = self.implementation.dispatchers.get(self.shapes.dispatcher)
        if region is None or work.region != DISPATCH or self.shapes.ep == 1:
            return NO_KERNELS
        return self._pass(work, region)

    def _pass(self, work: Work, region: Region) -> Kernels:
        kernels = region.backward if work.phase == "backward" else region.forward
        if self.software.tensor_scales and any(PEAK_OF.get(product.dtype) == "fp8" for product in work.products):
            return kernels.plus(self.implementation.tensor_scales)
        return kernels

    def _product(self, product: Product, region: str) -> tuple[str, float]:
        """Category of a product, and its seconds."""
        if is_attention(product, region):
            return "attention", self.rates.attention(product)
        if product.groups > 1 or region.startswith("expert"):
            return "experts", self.shapes.skew * self.rates.product(product, is_grouped=True)
        return "products", self.rates.product(product, is_grouped=False)

    def _bytes(self, work: Work, region: Region | None) -> float:
        """Bytes of passes over memory of one layer, without the products."""
        if region is None:
            return self._share_of_rows(work) * work.nbytes
        kernels = self._pass(work, region)
        stream = self.shapes.tokens * self.shapes.hidden
        read, returned, quantized = _values(work)
        skew = self.shapes.skew if work.region.startswith("expert") else 1.0
        of_products = kernels.inputs * read + kernels.outputs * returned + kernels.quantized * quantized
        rows = self.shapes.skew * self.shapes.top_k * stream * self._kernels_of_dispatcher(work).rows
        return kernels.stream * stream + skew * of_products + rows

    def _share_of_rows(self, work: Work) -> float:
        """Bytes of passes on the rank with most rows, beside those with even routing, that a plan has measured.

        All passes around products of experts are over their rows. Of what dispatches and combines pass over, half are
        rows of the rank's own tokens.
        """
        if work.region.startswith(ROWS_OF_EXPERTS):
            return self.shapes.more_rows
        return (1 + self.shapes.more_rows) / 2 if work.region in EXPERT_REGIONS else 1.0

    def _launches(self, work: Work, region: Region | None) -> tuple[float, float]:
        """Launches of the host, and kernels that a CUDA graph launches, of one layer."""
        groups = max((product.groups for product in work.products), default=0)
        if region is None:
            number = float(work.launches)
            preprocess = 0.0
        else:
            kernels = self._pass(work, region)
            number = kernels.launches + kernels.group * groups + self._kernels_of_dispatcher(work).launches
            number += self._on_host(work).copies
            preprocess = kernels.preprocess
        graphs = self.software.graphs
        if graphs == "full":
            return 0.0, number + preprocess
        held = graphs if isinstance(graphs, tuple) else ()
        graphed = 0.0
        if any(work.region in self.implementation.graph_scopes.get(scope, ()) for scope in held):
            graphed, number = number, 1 / self.figures.graph_regions.value
        if "moe_preprocess" in held and preprocess:
            graphed, preprocess = graphed + preprocess, 1.0
        return number + preprocess, graphed

    def _transfers(self, work: Work) -> tuple[float, float, float, float]:
        """Seconds of links in one layer: of experts, of tensors, of gathers, and to the next stage."""
        if work.region in EXPERT_REGIONS:
            return self.skewed(self._rows(work)), 0.0, 0.0, 0.0
        tensor = gathers = send = 0.0
        for transfer in work.transfers:
            if transfer.kind == SEND:
                send += self._move(transfer)
            elif work.region == OUTSIDE or "dp" in transfer.group or "shard" in transfer.group:
                gathers += self._move(self._summed(transfer))
            else:
                tensor += self._move(transfer)
        return 0.0, tensor, gathers, send

    def _rows(self, work: Work) -> float:
        """Seconds of links for the rows of experts in one layer, with even routing."""
        if self._is_modelled:
            movements = {DISPATCH: 1 if work.phase == "recompute" else 2}.get(work.region, 0)
            return movements * self.deduplicated()
        routes = [(transfer, self._expected(transfer)) for transfer in work.transfers]
        if routes and self.shapes.in_library and self.shapes.dispatcher in self.implementation.once_to:
            node = sum(transfer.times * route.node for transfer, route in routes)
            network = sum(transfer.times * route.network for transfer, route in routes)
            return self.rates.movement(node, network, self.shapes.dispatcher)
        return sum(
            transfer.times * self.rates.move(transfer.kind, route, self.shapes.dispatcher) for transfer, route in routes
        )

    def _expected(self, transfer: Transfer) -> Route:
        """Route of a transfer of rows, with as many rows of a token as it is expected to have places.

        A plan has as many as there can be, which differs where a row is sent once to all experts of a place.
        """
        route = self.nodes.route(transfer)
        shapes = self.shapes
        once_to = self.implementation.once_to.get(shapes.dispatcher)
        if once_to is None or shapes.is_static or transfer.kind != ALL_TO_ALL:
            return route
        if once_to == "node" and transfer.network and not transfer.node:  # a hop to the nodes of the plan
            nodes = self._nodes_of(self.nodes.planned)
            share = places_of_token(shapes, nodes) / min(shapes.top_k, nodes)
            return evolve(route, node=share * route.node, network=share * route.network)
        planned = min(shapes.top_k, shapes.ep)
        to_ranks = places_of_token(shapes, shapes.ep) / planned
        to_nodes = places_of_token(shapes, self._nodes_of(self.nodes.real)) / planned
        over_network = to_nodes if once_to == "node" or shapes.in_library else to_ranks
        return evolve(route, node=to_ranks * route.node, network=over_network * route.network)

    def _nodes_of(self, gpus: int) -> int:
        """Nodes of so many GPUs over which the experts lie."""
        return max(1, -(-self.shapes.ep * self.shapes.etp // gpus))

    def sends_meet_no_rows(self, work: Sequence[Work]) -> bool:
        """Whether stages send over the network, and dispatchers inside of nodes alone.

        Rows of experts and what goes to the next stage then wait for each other on no link.
        """
        sends = [transfer for each in work for transfer in each.transfers if transfer.kind == SEND]
        return any(map(self._leaves_node, sends)) and not self._rows_leave_node(work)

    def _rows_leave_node(self, work: Iterable[Work]) -> bool:
        """Whether the dispatcher sends any rows of experts over the network."""
        if self._is_modelled:
            return self.shapes.ep * self.shapes.etp > self.nodes.real
        of_rows = (transfer for each in work if each.region in EXPERT_REGIONS for transfer in each.transfers)
        return any(map(self._leaves_node, of_rows))

    def _leaves_node(self, transfer: Transfer) -> bool:
        """Whether a transfer goes over the network."""
        return self.nodes.route(transfer).network > 0

    def skewed(self, seconds: float) -> float:
        """Seconds until the rank with most rows has them."""
        return seconds * self.shapes.more_rows

    def deduplicated(self) -> float:
        """Seconds of a movement in which a token's row goes once to each node, and there once to each rank."""
        shapes = self.shapes
        row = shapes.tokens * shapes.hidden * shapes.itemsize
        everyone = shapes.ep * shapes.etp
        nodes = self._nodes_of(self.nodes.real)
        ranks = places_of_token(shapes, shapes.ep) * shapes.etp * (everyone - 1) / everyone
        to_nodes = places_of_token(shapes, nodes) * (nodes - 1) / nodes if nodes > 1 else 0.0
        return self.rates.movement(row * ranks, row * to_nodes, shapes.dispatcher)

    @property
    def _is_modelled(self) -> bool:
        """Whether what the dispatcher sends follows from the expected places of a token."""
        return self.shapes.dispatcher in self.implementation.deduplicates and self.shapes.ep > 1

    def _move(self, transfer: Transfer) -> float:
        """Seconds of the links for a transfer, all times."""
        return transfer.times * self.rates.move(transfer.kind, self.nodes.route(transfer), self.shapes.dispatcher)


def _in_8_bits(work: Work) -> Work:
    """Work whose products of 16 bits are in 8."""
    products = [evolve(each, dtype=IN_8_BITS) if PEAK_OF.get(each.dtype) == "bf16" else each for each in work.products]
    return evolve(work, products=tuple(products))


def _values(work: Work) -> tuple[float, float, float]:
    """Values that products of a region read, return, and read or get back in 8 bits or less: as in forward.

    Products of one input, such as those of queries and keys, read it once.
    """
    read: set[tuple[int, int]] = set()
    returned = quantized_returned = 0.0
    quantized_read: set[tuple[int, int]] = set()
    for product in work.products:
        if product.during == "wgrad" or product.scores is not None:
            continue
        rows, columns, summed = product.shape
        if product.during == "dgrad":
            columns, summed = summed, columns
        read.add((rows, summed))
        returned += product.times * rows * columns
        if PEAK_OF.get(product.dtype) in ("fp8", "fp4"):
            quantized_read.add((rows, summed))
            quantized_returned += product.times * rows * columns
    is_backward = work.phase == "backward"
    quantized = quantized_returned if is_backward else float(sum(rows * width for rows, width in quantized_read))
    return float(sum(rows * width for rows, width in read)), returned, quantized


def quantized_weights(work: Iterable[Work]) -> float:
    """Weights that products of a micro-batch's forward read in 8 bits or less."""
    number = 0
    for each in work:
        for product in each.products if each.phase == "forward" else ():
            if product.scores is None and PEAK_OF.get(product.dtype) in ("fp8", "fp4"):
                _, columns, summed = product.shape
                number += each.layers * product.times * product.groups * columns * summed
    return float(number)


def _operand_bytes(work: Work) -> float:
    """Bytes of what products of a region read in forward, besides weights, each matrix once."""
    read: dict[tuple[int, int], float] = {}
    for product in work.products:
        if product.during == "wgrad" or product.scores is not None:
            continue
        rows, columns, summed = product.shape
        width = columns if product.during == "dgrad" else summed
        read[rows, width] = rows * width * ITEMSIZE.get(PEAK_OF.get(product.dtype, ""), FP32)
    return sum(read.values())


def total(spent: Iterable[tuple[int, Spent]]) -> Spent:
    """Sum of what layers spend, each so many times."""
    sums = [0.0] * len(NAMES)
    for times, each in spent:
        sums = [own + times * more for own, more in zip(sums, VALUES(each), strict=True)]
    return Spent(**dict(zip(NAMES, sums, strict=True)))
