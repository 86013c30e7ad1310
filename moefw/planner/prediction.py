"""What is predicted of a spec: a rank's plan and, on a cluster, the time of a step.

Imports torch only to measure, and what predicts time only where there is a cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen

from moefw.compose.assembly import Assembly
from moefw.compose.machine import this_machine
from moefw.core.errors import PlanError, SpecError
from moefw.core.site import Machine
from moefw.planner import cluster as clusters
from moefw.planner.budget import Budget
from moefw.planner.cluster import Cluster
from moefw.planner.formats import unmultiplied
from moefw.planner.plans import ledger
from moefw.planner.report import Ledger
from moefw.planner.skew import EVEN
from moefw.planner.skew_in_words import in_words
from moefw.planner.time import software
from moefw.planner.time.nodes import ranks_of_node
from moefw.planner.time.software import Software

if TYPE_CHECKING:
    from moefw.planner.time.advice import Advice
    from moefw.planner.time.forecast import Forecast


@frozen(kw_only=True)
class Circumstances:
    """What a spec does not say: the cluster, the software that runs, and how skewed routing is.

    ``cluster_name``: as it was asked for. ``skew``: rows of the rank with most beside the mean.
    """

    cluster_name: str | None = None
    cluster: Cluster | None = None
    runs: Software = Software()
    skew: float = EVEN
    needs_time: bool = False
    """Whether something was asked that the time of a step alone answers."""

    def machine(self, device: str) -> Machine:
        """What a spec runs on that asks for a device: the cluster, or this machine."""
        if self.cluster is None or self.cluster_name is None:
            return this_machine(device)
        return self.cluster.machine(self.cluster_name, device)

    def ranks_of_node(self, assembly: Assembly) -> int | None:
        """Ranks that share a node of the cluster; None: the spec says how many, all are in one, or it is unknown."""
        return None if self.cluster is None else ranks_of_node(assembly, self.cluster, assembly.layout.world)

    @classmethod
    def read(cls, cluster: str | None, runs_as: str | None, skew: float) -> Circumstances:
        """Circumstances of the command line. Raises SpecError for a name or a file that cannot be read."""
        if cluster is None and runs_as is not None:
            raise SpecError("--as: time needs a cluster.", "Add --cluster NAME.")
        return cls(
            cluster_name=cluster,
            cluster=None if cluster is None else clusters.read(cluster),
            runs=Software() if runs_as is None else software.read(runs_as),
            skew=skew,
            needs_time=runs_as is not None,
        )


@frozen(kw_only=True)
class Prediction:
    """What is predicted of a spec. ``time``: None without a cluster, without one that has what time needs, or of a plan
    that is unknown. ``lacking``: the figures that the cluster lacks. ``advice``: what to try against each cost of the
    step, if that was asked for, and ``budget``: what tokens cost.
    """

    assembly: Assembly
    plan: Ledger
    circumstances: Circumstances
    time: Forecast | None
    lacking: tuple[str, ...] = ()
    advice: tuple[Advice, ...] = ()
    budget: Budget | None = None

    def to_data(self) -> dict[str, Any]:
        """Plain data: the plan, and what a cluster adds."""
        data = self.plan.to_data()
        cluster = self.circumstances.cluster
        if cluster is not None:
            from moefw.planner.sheets import on_cluster

            data["cluster"] = on_cluster(cluster, self.circumstances.cluster_name, self.plan)
        if self.notes:
            data["notes"] = list(self.notes)
        if self.time is not None:
            data["time"] = self.time.to_data()
            data["seconds"] = dict(self.time.step.categories)
            data["try"] = [each.to_data() for each in self.advice]
        if self.budget is not None:
            data["budget"] = self.budget.to_data()
        return data

    @property
    def notes(self) -> tuple[str, ...]:
        """What skewed routing changes of the plan, and what bounds it."""
        return tuple(in_words(self.assembly, self.plan, self.circumstances.skew))

    def with_advice(self, assemble: Callable[[Sequence[str]], Assembly]) -> Prediction:
        """This with what to try, where the time of a step is known. ``assemble``: the spec with more overrides."""
        if self.time is None:
            return self
        from moefw.planner.time.advice import advice

        return evolve(self, advice=advice(self.time, self.assembly, assemble))

    def with_budget(self, tokens: float, tokens_per_s_per_gpu: float | None) -> Prediction:
        """This with what tokens cost at a speed; None: the predicted one. Raises SpecError if there is none."""
        cluster = self.circumstances.cluster
        if tokens_per_s_per_gpu is None:
            if self.time is None:
                what = "--tokens: their speed is unknown, without a time of a step."
                fix = "Add --cluster NAME, or --tokens-per-s-per-gpu: a run's tokens_per_s, over its ranks."
                raise SpecError(what, fix)
            tokens_per_s_per_gpu = self.time.tokens_per_s_per_gpu
        budget = Budget(
            tokens=tokens,
            tokens_per_s_per_gpu=tokens_per_s_per_gpu,
            gpus=self.assembly.layout.world,
            usd_per_gpu_hour=None if cluster is None else cluster.usd_per_gpu_hour,
        )
        return evolve(self, budget=budget)


def predict(assembly: Assembly, circumstances: Circumstances, cache: Path) -> Prediction:
    """Prediction of a spec. ``cache``: folder of earlier ledgers.

    Raises SpecError for time that cannot be told, and PlanError for formats that the cluster's GPUs do not multiply.
    """
    cluster = circumstances.cluster
    if cluster is not None:
        problem = unmultiplied(assembly.parts.precision, cluster, circumstances.cluster_name)
        if problem is not None:
            raise PlanError([problem])
    skew = circumstances.skew
    plan = ledger(assembly, cache=cache, skew=skew if skew > EVEN else None)
    if cluster is None:
        return Prediction(assembly=assembly, plan=plan, circumstances=circumstances, time=None)
    from moefw.planner.time.forecast import HOW_TO_ADD, lacks

    lacking = tuple(lacks(cluster, plan, circumstances.runs))
    if lacking and circumstances.needs_time:
        name = circumstances.cluster_name
        what = f"--as: the cluster {name} has no {', '.join(lacking)}, which time needs."
        raise SpecError(what, HOW_TO_ADD)
    return Prediction(
        assembly=assembly,
        plan=plan,
        circumstances=circumstances,
        time=None if lacking else _time(assembly, plan, circumstances),
        lacking=lacking,
    )


def _time(assembly: Assembly, plan: Ledger, circumstances: Circumstances) -> Forecast | None:
    cluster = circumstances.cluster
    if cluster is None or circumstances.cluster_name is None or plan.unknown:
        return None
    from moefw.planner.time.forecast import forecast

    name = Path(circumstances.cluster_name).stem
    return forecast(assembly, plan, cluster, name, circumstances.runs)
