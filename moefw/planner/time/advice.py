"""What to try against each cost of a step: overrides of a spec, which the spec lacks and accepts. Imports no torch."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from string import Template
from typing import Any, Final, Literal

from attrs import asdict, field, frozen
from attrs.validators import min_len

from moefw.compose.assembly import Assembly
from moefw.compose.spec.source import Marks, key_path, read_yaml
from moefw.core.errors import MoefwError
from moefw.planner.cluster import Cluster
from moefw.planner.data_files import read_file
from moefw.planner.overhead import left_bytes
from moefw.planner.report import Ledger
from moefw.planner.skew import EVEN
from moefw.planner.time.costs import EXPERT_REGIONS
from moefw.planner.time.figures import generation_name
from moefw.planner.time.forecast import Forecast
from moefw.planner.time.nodes import Nodes

FILE: Final = Path(__file__).parent / "advice.yaml"
LEAST: Final = 0.02
"""Share of a step that a cost must have before anything is said against it."""
ON_A_GPU: Final = "run.device=cuda"
"""The override without which a machine that has no GPU refuses what needs one."""


@frozen(kw_only=True)
class Change:
    """A change of the spec's ``key``: to a ``value`` in YAML or, without one, to ``times`` the number that it has.

    ``now``: values in YAML of which the spec has one, be it with more options; empty: it may have any.
    """

    key: str
    value: str | None = None
    times: float = 1.0
    now: tuple[str, ...] = ()


@frozen(kw_only=True)
class Option:
    """What addresses some categories of a step's time, with the reason and its source.

    ``ways``: changes that are made together; of several, the first that a spec accepts. ``gpus``: the generations that
    it is for; empty: any machine. ``keeps_all``: whether all is kept that policies drop between forward and backward,
    so that it is only for plans in which that fits. ``experts_over``: whether it is for experts of a layer that lie in
    several nodes, or over the ranks of one; None: either. ``experts_a_rank``: the fewest experts of a rank that it is
    for.
    """

    against: tuple[str, ...] = field(validator=min_len(1))
    ways: tuple[tuple[Change, ...], ...] = field(validator=min_len(1))
    because: str
    source: str
    gpus: tuple[Literal["hopper", "blackwell"], ...] = ()
    keeps_all: bool = False
    experts_over: Literal["nodes", "ranks"] | None = None
    experts_a_rank: int = 1


@frozen(kw_only=True)
class Options:
    """All that moefw knows to try."""

    options: tuple[Option, ...]


@cache
def options() -> tuple[Option, ...]:
    """Options of moefw."""
    return read_file(Options, FILE, option="advice").options


@frozen
class Trial:
    """Overrides that a spec accepts, with the reason and its source."""

    overrides: tuple[str, ...]
    because: str
    source: str

    @property
    def pasted(self) -> str:
        """The overrides as a shell takes them."""
        return shlex.join(self.overrides)


@frozen
class Advice:
    """What to try against a category: removing its cost would shorten a step by ``gain``, a share of it, at most."""

    category: str
    gain: float
    trials: tuple[Trial, ...]

    def to_data(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def advice(time: Forecast, assembly: Assembly, assemble: Callable[[Sequence[str]], Assembly]) -> tuple[Advice, ...]:
    """What to try against each cost of a step, the largest gain first.

    ``assemble``: the same spec with more overrides; raises MoefwError if it is refused.
    """
    gains = {category: time.gain(category) for category in time.step.categories}
    worth = [category for category, gain in gains.items() if gain >= LEAST]
    wanted = [option for option in options() if set(option.against) & set(worth)]
    tried = [(option, _trial(option, time, assembly, assemble)) for option in wanted]
    return tuple(
        Advice(
            category,
            gains[category],
            tuple(trial for option, trial in tried if trial is not None and category in option.against),
        )
        for category in sorted(worth, key=lambda each: -gains[each])
    )


def _trial(
    option: Option, time: Forecast, assembly: Assembly, assemble: Callable[[Sequence[str]], Assembly]
) -> Trial | None:
    """Trial of an option; None if it is not for the cluster or the layout, or the spec has it already or refuses it."""
    if option.gpus and generation_name(time.cluster) not in option.gpus:
        return None
    if option.keeps_all and not _all_fits(time.plan, time.cluster):
        return None
    if option.experts_over is not None and option.experts_over != _experts_over(time):
        return None
    if assembly.site.dims.num_experts < option.experts_a_rank * assembly.layout.size("ep"):
        return None
    for changes in option.ways:
        asked = overrides(changes, assembly, skew=time.plan.skew or EVEN)
        if asked is None:
            continue
        if _accepts(assemble, asked):
            return Trial(asked, option.because, option.source)
        on_a_gpu = (*asked, ON_A_GPU)
        if time.cluster.gpu.threads is None and _accepts(assemble, on_a_gpu):
            return Trial(on_a_gpu, option.because, option.source)
    return None


def _experts_over(time: Forecast) -> Literal["nodes", "ranks"]:
    """Over what the experts of a layer lie: over nodes, if any of their rows leave one."""
    nodes = Nodes.of_plan(time.cluster, time.plan)
    work = [each for position in time.plan.positions for each in position.work if each.region in EXPERT_REGIONS]
    leave = any(nodes.route(transfer).network for each in work for transfer in each.transfers)
    return "nodes" if leave else "ranks"


def _accepts(assemble: Callable[[Sequence[str]], Assembly], asked: Sequence[str]) -> bool:
    try:
        assemble(asked)
    except MoefwError:
        return False
    return True


def _all_fits(plan: Ledger, cluster: Cluster) -> bool:
    """Whether a plan fits that keeps all on the GPU: what passes in flight save, and the optimizer's states."""
    dropped = plan.in_flight * (plan.totals["without_policies"] - plan.totals["saved"]) + plan.held.host
    left = left_bytes(cluster, plan)
    return left is not None and dropped <= left


def overrides(changes: Sequence[Change], assembly: Assembly, *, skew: float = EVEN) -> tuple[str, ...] | None:
    """Override of each change; None if the spec has made one of them already, has what is better, or lacks its key.

    ``skew``: rows of the rank with most beside the mean.
    """
    spec = assembly.resolved()
    sizes = assembly.layout.sizes
    tokens = assembly.spec.train.micro_batch * assembly.spec.train.seq_len
    known = {
        "tokens": str(tokens // (sizes.get("tp", 1) * sizes.get("cp", 1))),
        "node_ranks": str(assembly.site.ranks_per_node or ""),
        "skew": f"{skew:g}",
    }
    values = [_value(change, spec, known) for change in changes]
    if None in values:
        return None
    return tuple(f"{change.key}={value}" for change, value in zip(changes, values, strict=True))


def _value(change: Change, spec: Mapping[str, Any], known: Mapping[str, str]) -> str | None:
    """Value of a change, in YAML; None if the spec has it already, or what is better, or has no such key or number."""
    try:
        now = _at(spec, change.key)
    except LookupError:
        return None
    if change.now and not any(_has(now, _parsed(change.key, value)) for value in change.now):
        return None
    if change.value is None:
        return _multiplied(now, change.times)
    value = Template(change.value).substitute(known)
    wanted = _parsed(change.key, value)
    return None if wanted is None or _has(now, wanted) else value


def _parsed(key: str, value: str) -> Any:
    """Value of a key, given in YAML."""
    return read_yaml(f"value: {value}", Marks(key), [])["value"]


def _at(spec: Any, key: str) -> Any:
    """Value of a resolved spec at a key path. Raises LookupError if it has no such key."""
    for part in key_path(key):
        if not isinstance(spec, Mapping):
            raise LookupError(key)
        spec = spec[part]
    return spec


def _multiplied(now: object, times: float) -> str | None:
    """So many times a whole number; None if that is no whole number from 1."""
    if not isinstance(now, int) or isinstance(now, bool):
        return None
    value = now * times
    return str(int(value)) if value >= 1 and value == int(value) else None


def _has(now: Any, wanted: Any) -> bool:
    """Whether a resolved value has all that is wanted."""
    if isinstance(wanted, Mapping):
        return isinstance(now, Mapping) and all(_has(now.get(key), value) for key, value in wanted.items())
    return bool(now == wanted)
