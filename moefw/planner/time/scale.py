"""What seconds of each category are multiplied with, and how they add up. Imports no torch.

Of a GPU whose products are published shares it is at most seven numbers, fitted to published runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Final

from attrs import evolve, field, frozen
from attrs.validators import gt

from moefw.planner.cluster import Cluster
from moefw.planner.data_files import Figure, read_file
from moefw.planner.time.costs import Spent
from moefw.planner.time.figures import Figures
from moefw.planner.time.rates import MICRO

FILE: Final = Path(__file__).parent / "fitted.yaml"
GLOBAL: Final = ("products", "grouped", "passes", "host", "transfers", "power", "merged")


@frozen(kw_only=True)
class Fitted:
    """Fitted numbers. ``products``, ``grouped``, ``passes``: of the shares that the figures say; ``grouped`` more.

    ``host``: of the host's time for a launch; ``transfers``: of the time of transfers of experts; ``power``: the
    exponent of a board's power for each TFLOPS; ``merged``: the share of transfers that overlap leaves exposed.
    ``software_2025`` and ``stacks``: the time of a step of such software beside that of Megatron in 2026.
    """

    products: float = field(validator=gt(0.0))
    grouped: float = field(validator=gt(0.0))
    passes: float = field(validator=gt(0.0))
    host: float = field(validator=gt(0.0))
    transfers: float = field(validator=gt(0.0))
    power: float = field(validator=gt(0.0))
    merged: float = field(validator=gt(0.0))
    software_2025: float = field(validator=gt(0.0))
    stacks: Mapping[str, float]


@cache
def fitted() -> Fitted:
    """The numbers of the last fit."""
    return read_file(Fitted, FILE, option="fitted")


@frozen
class Scale:
    """What the seconds of each category are multiplied with on a cluster, and which of them run side by side."""

    products: float
    experts: float
    attention: float
    passes: float
    host_s: float
    """Seconds of the host for a launch."""
    last_host_s: float
    """The same in the last micro-batch of a step whose gradients are summed over ranks: its backward runs phase by
    phase, for sums to begin as soon as gradients end."""
    gap_s: float
    """Seconds between two kernels of a graph."""
    transfers: float
    tensor: float
    """Share of other transfers inside of layers that nothing hides."""
    merged: float
    meeting: float
    sums: float
    """Share of sums of gradients that no backward hides."""
    beside: float = 1.0
    """Seconds of transfers that a second of computation has room for beside it; 0: nothing runs beside anything."""
    step_s: float = 0.0
    """Seconds of what a step does besides its work: batch, zeroed gradients, sums of metrics, log."""

    @classmethod
    def of(cls, numbers: Fitted, cluster: Cluster, figures: Figures, world: int = 1) -> Scale:
        """Scale on a cluster. Fitted numbers are of published shares: what was measured is as it was measured.

        ``world``: ranks that train together, as what their host takes was measured apart.
        """
        if not cluster.is_measured:
            return cls._published(numbers, cluster, figures)
        if cluster.gpu.threads is None:
            return cls._measured_gpu(numbers, cluster, figures, world)
        return cls._threads(cluster, world)

    @classmethod
    def _threads(cls, cluster: Cluster, world: int) -> Scale:
        """Scale of ranks that compute in the threads of their host: one thing runs after the other.

        Transfers have threads of their own, but no cores of their own.
        """
        host_s = _seconds(cluster.host_layer_us)
        return cls(
            products=1.0,
            experts=1.0,
            attention=1.0,
            passes=1.0,
            host_s=host_s,
            last_host_s=host_s if world == 1 else _seconds(cluster.host_layer_of_ranks_us),
            gap_s=0.0,
            transfers=1.0,
            tensor=1.0,
            merged=1.0,
            meeting=1.0,
            sums=1.0,
            beside=0.0,
            step_s=_seconds(cluster.host_step_us if world == 1 else cluster.host_step_of_ranks_us),
        )

    @classmethod
    def _measured_gpu(cls, numbers: Fitted, cluster: Cluster, figures: Figures, world: int) -> Scale:
        """Scale of GPUs that were measured. What runs side by side there is as on others."""
        return evolve(
            cls._threads(cluster, world),
            gap_s=figures.gap_us.value * MICRO,
            tensor=figures.tensor_parallel_exposed.value,
            merged=numbers.merged,
            meeting=figures.meeting.value,
            sums=figures.sums_exposed.value,
            beside=1.0,
        )

    @classmethod
    def _published(cls, numbers: Fitted, cluster: Cluster, figures: Figures) -> Scale:
        """Scale of fitted numbers on a cluster of GPUs."""
        power = _power(numbers, cluster, figures)
        launch = figures.host_launch_us if cluster.host_launch_us is None else cluster.host_launch_us
        host_s = launch.value * MICRO * numbers.host
        return cls(
            products=1 / (numbers.products * power),
            experts=1 / (numbers.products * numbers.grouped * power),
            attention=1 / power,
            passes=1 / numbers.passes,
            host_s=host_s,
            last_host_s=host_s,
            gap_s=figures.gap_us.value * MICRO,
            transfers=numbers.transfers,
            tensor=figures.tensor_parallel_exposed.value,
            merged=numbers.merged,
            meeting=figures.meeting.value,
            sums=figures.sums_exposed.value,
        )

    def device(self, spent: Spent) -> float:
        """Seconds of the GPU without transfers."""
        of_products = self.products * spent.products + self.attention * spent.attention + self.experts * spent.experts
        return of_products + self.passes * spent.passes + self.gap_s * spent.kernels

    def exposed(self, spent: Spent, *, is_merged: bool) -> float:
        """Seconds of transfers, and of copies between a GPU and its host, that nothing hides."""
        computes = self.device(spent)
        experts = self.transfers * spent.expert_transfers
        if is_merged:  # what takes longer than all that it could run beside is seen
            experts = max(self.merged * experts, experts - self.beside * computes)
        gathers = max(0.0, spent.gathers - self.beside * computes)
        copies = max(spent.unhidden, self.both_ways(spent.stores, spent.fetches) - self.beside * computes)
        return experts + self.tensor * spent.tensor_transfers + gathers + copies

    def both_ways(self, stores: float, fetches: float) -> float:
        """Seconds of copies to the host and from it: side by side, where anything runs beside anything."""
        return max(stores, fetches) if self.beside else stores + fetches

    def host(self, spent: Spent) -> float:
        """Seconds of the host."""
        return self.host_s * spent.launches

    def together(self, spent: Spent, *, is_merged: bool) -> float:
        """Seconds of a pass: of the GPU and the host, which wait for each other where counts are read."""
        order = self.meeting
        gpu = self.device(spent) + self.exposed(spent, is_merged=is_merged)
        both: float = (gpu**order + self.host(spent) ** order) ** (1 / order)
        return both


def _power(numbers: Fitted, cluster: Cluster, figures: Figures) -> float:
    """What shares of a generation are multiplied with on a GPU, for its power. No product exceeds ``most_of_peak``."""
    generation = figures.generation(cluster)
    power: float = generation.power_of(cluster.gpu) ** numbers.power
    return min(power, figures.most_of_peak.value / (numbers.products * generation.highest_share))


def _seconds(figure: Figure | None) -> float:
    """Seconds of a figure in microseconds."""
    assert figure is not None, "the cluster lacks no figure"
    return figure.value * MICRO
