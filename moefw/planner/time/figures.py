"""The figures with which time is computed, beside a cluster's: each with its source. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Final

from attrs import field, frozen

from moefw.planner.cluster import Cluster
from moefw.planner.data_files import Figure, read_file

FILE: Final = Path(__file__).parent / "figures.yaml"
HOPPER: Final = "hopper"
BLACKWELL: Final = "blackwell"


@frozen(kw_only=True)
class Generation:
    """Shares of a peak that products of a GPU's generation reach at ``board_power_w``.

    ``grouped_wgrad_bf16`` and its like: gradients of grouped weights beside the other grouped products of their format.
    Attention: of the peak of bf16.
    """

    board_power_w: Figure
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

    ``gap_us``: between two kernels. ``graph_regions``: those that a graph of a scope holds.
    ``tensor_parallel_exposed``, ``sums_exposed``: shares of the time of transfers inside of layers, and of sums of
    gradients, that nothing hides. ``meeting``: host and device together take the root of this order of the sum of their
    powers.
    """

    generations: Mapping[str, Generation] = field(factory=dict)
    attention_fp8_times: Figure
    fp32_share: Figure
    tile_rows: Figure
    tile_overhead: Figure
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
        """Generation of a cluster's GPUs."""
        return self.generations[self.generation_name(cluster)]

    def generation_name(self, cluster: Cluster) -> str:
        """Name of the generation of a cluster's GPUs: Blackwell, or one like it, if they multiply fp4."""
        return HOPPER if cluster.gpu.peak_tflops.fp4 is None else BLACKWELL


@cache
def figures() -> Figures:
    """Figures of moefw."""
    return read_file(Figures, FILE, option="figures")
