"""Whether the GPUs of a cluster multiply the formats of a recipe. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from moefw.core.errors import Problem
from moefw.core.plugin import PrecisionPlugin
from moefw.planner import cluster as clusters
from moefw.planner.cluster import Cluster


def unmultiplied(precision: PrecisionPlugin, cluster: Cluster, name: str | None) -> Problem | None:
    """Problem of a recipe whose formats no GPU of a cluster multiplies; None: they do, or it is unknown."""
    own = cluster.gpu.capability
    if own is None or not precision.capabilities or own in precision.capabilities:
        return None
    capabilities = " or ".join(precision.capabilities)
    what = (
        f"{precision.name} needs GPUs of compute capability {capabilities}, which multiply its formats; those of "
        f"{name} have {own}, and its time there is not known."
    )
    return Problem(what, f"Use another recipe, or one of {', '.join(_with(precision.capabilities))}.", "precision")


@cache
def _with(capabilities: tuple[str, ...]) -> Sequence[str]:
    """Names of the clusters that moefw has whose GPUs have one of these compute capabilities."""
    return [name for name in clusters.names() if clusters.read(name).gpu.capability in capabilities]
