"""The figures with which time is computed, beside a cluster's: each with its source. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Final

from attrs import field, frozen

from moefw.planner.cluster import Cluster, Gpu
from moefw.planner.data_files import Figure, read_file

FILE: Final = Path(__file__).parent / "figures.yaml"
HOPPER: Final = "hopper"
BLACKWELL: Final = "blackwell"
FIRST_OF_BLACKWELL: Final = 10.0
"""The lowest compute capability of a GPU that counts as Blackwell. Older ones than Hopper count as Hopper."""


@frozen(kw_only=True)
class Generation:
    """Shares of a peak that products of a GPU's generation reach, by measurements on one with this power and peak.

    ``grouped_wgrad_bf16`` and its like: gradients of grouped weights beside the other grouped products of their format.
    Attention: of the peak of bf16.
    """

    board_power_w: Figure
    peak_bf16_tflops: Figure
    dense_bf16: Figure
    dense_fp8: Figure
    dense_fp4: Figure
    grouped_bf16: Figure
    grouped_fp8: Figure
    grouped_fp4: Figure
    grouped_wgrad_bf16: Figure
    grouped_wgrad_fp8: Figure
    grouped_wgrad_fp4: Figure
    attention_forward: Figure
    attention_backward: Figure

    @property
    def highest_share(self) -> float:
        """The highest share of its peak that a dense product reaches."""
        return max(share.value for share in (self.dense_bf16, self.dense_fp8, self.dense_fp4))

    def power_of(self, gpu: Gpu) -> float:
        """Watts of a GPU for each TFLOPS of its peak, beside those of the GPU that was measured.

        They bound products: each operation takes energy, and a GPU with more of it comes nearer to its peak.
        """
        assert gpu.board_power_w is not None, "the cluster lacks no figure"
        watts = gpu.board_power_w.value / gpu.peak_tflops.bf16.value
        return watts * self.peak_bf16_tflops.value / self.board_power_w.value


@frozen(kw_only=True)
class Transfers:
    """Shares of a link's rate that dispatchers and collectives reach, and the latency of each of their calls."""

    node: Mapping[str, Figure]
    network: Mapping[str, Figure]
    latency_us: Figure


@frozen(kw_only=True)
class Figures:
    """All figures. ``passes`` and ``optimizer_pass``: shares of the rate of memory, the last of the host's, too.

    ``tile_overhead``: the width over which a product sums while a tile begins and ends, for each TFLOPS of endless
    sums: that takes the same time in every format, and a faster one sums over more in it.

    ``most_of_peak``: the share of its peak that no product exceeds. ``gap_us``: between two kernels.
    ``graph_regions``: those that a graph of a scope holds. ``tensor_parallel_exposed``, ``sums_exposed``: shares of the
    time of transfers inside of layers, and of sums of gradients, that nothing hides. ``meeting``: host and device
    together take the root of this order of the sum of their powers.
    """

    generations: Mapping[str, Generation] = field(factory=dict)
    attention_fp8_times: Figure
    fp32_share: Figure
    tile_rows: Figure
    tile_overhead: Figure
    most_of_peak: Figure
    passes: Figure
    optimizer_pass: Figure
    gap_us: Figure
    host_launch_us: Figure
    transfers: Transfers
    graph_regions: Figure
    tensor_parallel_exposed: Figure
    sums_exposed: Figure
    meeting: Figure

    def generation(self, cluster: Cluster) -> Generation:
        """Generation of a cluster's GPUs, whose compute capability is known."""
        name = generation_name(cluster)
        assert name is not None, "the cluster lacks no figure"
        return self.generations[name]


def generation_name(cluster: Cluster) -> str | None:
    """Name of the generation whose shares a cluster's GPUs take; None: their compute capability is unknown."""
    capability = cluster.gpu.compute_capability
    if capability is None:
        return None
    return BLACKWELL if capability.value >= FIRST_OF_BLACKWELL else HOPPER


@cache
def figures() -> Figures:
    """Figures of moefw."""
    return read_file(Figures, FILE, option="figures")
