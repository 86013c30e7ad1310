"""Ranks for dispatcher checks: threads if possible, else gloo. Crashes are reported as sentences."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Final

import pytest
import torch.distributed as dist
from attrs import evolve

from moefw.compose.assembly import Assembly
from moefw.core.errors import ContractError, MoefwError, PlanError, PluginError
from moefw.core.facts import ANY, Offers
from moefw.testing.error_text import FRAME
from moefw.testing.layer_case import LayerCase
from moefw.testing.poisoned import poisoned_memory
from moefw.testing.suites import dispatch_assertions as assertions
from moefw.testing.suites.base import Suite
from moefw.testing.suites.dispatch_case import DispatchCase
from moefw.testing.suites.dispatch_ranks import Moved, misfits_when_called, moved, moved_twice
from moefw.testing.threads import thread_world

ARGUMENTS: Final = "test_its_methods_take_and_return_what_the_contract_says"
"""The check without which no other one is of use."""
HANGS: Final = ("no answer in time", "(not in ", "came to no collective")
"""Parts of messages about ranks that hang, of processes and of threads."""
GONE: Final = ("Connection closed by peer", "Connection reset by peer", "Socket closed")
"""Parts of gloo's messages on a rank after another rank has ended."""


class RefusedError(Exception):
    """The plugin refuses this case, with its reason. This is allowed, and no fault."""


class FaultError(Exception):
    """A fault of a dispatcher, in a sentence."""


def fail(what: str) -> None:
    """Fail the running check with a sentence, without a traceback."""
    pytest.fail(what, pytrace=False)


class DispatcherRunner(Suite):
    """Runs functions of :mod:`moefw.testing.suites.dispatch_ranks` on a case's ranks, and checks their results."""

    job_s: ClassVar[float] = 20.0
    """Seconds after which the ranks of a job count as hanging."""
    _known: ClassVar[dict[Any, Any]]
    """Cache of this plugin's assemblies and runs, which checks share."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._known = {}

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return the cached result of ``make``, or raise its cached error."""
        known = type(self)._known
        if key not in known:
            try:
                known[key] = (make(), None)
            except (RefusedError, FaultError) as error:
                known[key] = (None, error)
        value, raised = known[key]
        if raised is not None:
            raise raised.with_traceback(None)
        return value

    def layer_case_of(self, case: DispatchCase) -> LayerCase:
        """Layer case with the dispatcher for a dispatch case."""
        parts = {
            "parallel": {"experts": {"ep": case.ep, "etp": case.etp}, "ranks_per_node": case.ranks_per_node},
            "routing": {"use": "topk", "score": "sigmoid"},
            "gemm": {"use": "loop"},
        }
        return self.layer_case(
            tokens=(1,) * case.world,
            num_experts=case.num_experts,
            top_k=case.top_k,
            dim=case.dim,
            row_alignment=case.row_alignment,
            parts=parts,
        )

    def assembly_of(self, case: DispatchCase) -> Assembly:
        """Assembly of a case. Raises RefusedError if the plugin, or a part that does not fit, refuses it."""
        sizes = (case.num_experts, case.top_k, case.dim, case.row_alignment)
        key = ("assembly", case.world, case.etp, case.ranks_per_node, *sizes)

        def make() -> Assembly:
            try:
                assembly = self.layer_case_of(case).assemble()
            except PlanError as error:
                raise RefusedError(str(error)) from error
            except PluginError as error:
                pytest.fail(f"{self.plugin.name}: {error}", pytrace=False)
            self.aligned(assembly.parts.dispatch.offers(assembly.site.at(0)), case.row_alignment)
            return assembly

        assembly: Assembly = self._once(key, make)
        return assembly

    def aligned(self, offered: Offers, row_alignment: int) -> None:
        """Raise RefusedError if a row alignment is not offered; an alignment of 1 always is."""
        alignments = offered.get("row_alignment", (1,))
        if alignments != ANY and row_alignment not in (1, *alignments):
            raise RefusedError(f"rows aligned to {row_alignment} are not offered, only {alignments}")

    @property
    def on_threads(self) -> bool:
        """Whether the dispatcher runs on ranks that are threads: it uses its group only for collectives.

        If it raises there what the suite does not raise itself, its ranks are processes, where it may run.
        """

        def probe() -> bool:
            for world in self.profile.worlds:
                if world == 1:
                    continue
                case = DispatchCase(tokens=(1,) * world)
                try:
                    self._threads(moved, case, self.assembly_of(case), {})
                except (RefusedError, PlanError):
                    continue
                except ContractError:
                    return True
                except Exception:
                    return False
                return True
            return True

        return bool(self._once("threads", probe))

    def first_case(self) -> DispatchCase:
        """The first case that the plugin accepts, of one token a rank. Raises RefusedError if it accepts none."""

        def make() -> DispatchCase:
            reason = "no world"
            for world in self.profile.worlds:
                for num_experts in (8, 2 * world):
                    case = DispatchCase(tokens=(1,) * world, num_experts=num_experts)
                    try:
                        self.assembly_of(case)
                    except RefusedError as refusal:
                        reason = str(refusal)
                        continue
                    return case
            raise RefusedError(reason)

        case: DispatchCase = self._once("first case", make)
        return case

    def offers(self, **settings: Any) -> Offers:
        """The plugin's offers in the first world that it accepts; skip the check if it accepts none."""
        if settings:
            return super().offers(**settings)
        try:
            assembly = self.assembly_of(self.first_case())
        except RefusedError as refusal:
            pytest.skip(f"{self.plugin.name} refuses: {refusal}")
        offered: Offers = assembly.parts.dispatch.offers(assembly.site.at(0))
        return offered

    @property
    def misfits(self) -> list[str]:
        """Sentences about methods of the dispatcher that take or return something else than the contract says.

        None about a dispatcher that raises, of which every check says more.
        """

        def make() -> list[str]:
            case = self.first_case()
            for on_threads in (True, False):
                try:
                    sentences: list[str] = self._ranks(misfits_when_called, case, {}, on_threads=on_threads)[0]
                except FaultError:
                    continue
                return sentences
            return []

        return list(self._once("misfits", make))

    @property
    def ordered(self) -> bool:
        """Whether the plugin promises the order of an expert's rows."""
        return bool(self.offers().get("repeats", True))

    @property
    def exact(self) -> bool:
        """Whether equal movements give the same bits."""
        return self.repeats and self.ordered

    def different(self, pairs: assertions.Pairs) -> str | None:
        """First tensor that differs between movements that must be equal."""
        return assertions.different(pairs, exact=self.exact, ordered=self.ordered)

    def ranks(self, function: Callable[..., Any], case: DispatchCase, **how: Any) -> list[Any]:
        """``function(group, rank, case, assembly, **how)`` of every rank. Raises RefusedError, FaultError."""
        self.must_take_its_arguments()
        return self._ranks(function, case, how, on_threads=self.on_threads)

    def must_take_its_arguments(self) -> None:
        """Fail if a method does not do what it is called for: nothing else can be said of the dispatcher."""
        if self.misfits:
            fail(f"{self.plugin.name}: nothing is checked before {ARGUMENTS} passes. See there.")

    def _ranks(
        self, function: Callable[..., Any], case: DispatchCase, how: Mapping[str, Any], *, on_threads: bool
    ) -> list[Any]:
        assembly = self.assembly_of(case)
        try:
            if on_threads:
                return self._threads(function, case, assembly, how)
            return self.job(_on_gloo, case.world, function, self.layer_case_of(case), case, how)
        except PlanError as error:
            raise RefusedError(str(error)) from error
        except Exception as error:
            if isinstance(error, ContractError) and "PlanError" in str(error):
                raise RefusedError(str(error).partition("PlanError:")[2].partition(FRAME)[0].strip()) from error
            raise FaultError(f"{crash(error)} With {case}.") from error

    def _threads(
        self, function: Callable[..., Any], case: DispatchCase, assembly: Assembly, how: Mapping[str, Any]
    ) -> list[Any]:
        """Run a function on ranks that are threads. Raises what they raise."""
        with self._remembering_a_hang():
            return _on_threads(function, case, assembly, how, self.job_s)

    @contextmanager
    def _remembering_a_hang(self) -> Iterator[None]:
        """Raise again what ranks that hung inside have raised: each hang takes ``job_s`` and more."""
        known = type(self)._known
        if "hung" in known:
            raise known["hung"]
        try:
            yield
        except ContractError as error:
            if any(words in str(error) for words in HANGS) and FRAME not in str(error):
                known["hung"] = error
            raise

    def job(self, function: Callable[..., Any], world: int, *args: Any) -> list[Any]:
        """Run a function on gloo ranks. Raises ContractError; after a hang, every later call raises the same error."""
        # The declaration is pickled by name. A test file of pytest is imported, but may be on no path.
        package = self.plugin.__module__.partition(".")[0]
        is_local = "<locals>" in self.plugin.__qualname__
        if is_local or not any(finder.find_spec(package, None) for finder in sys.meta_path):
            what = f"{self.plugin.__qualname__} cannot be sent to other processes"
            fail(f"{self.plugin.name}: {what}: declare it at the top of a module that can be imported.")
        with self._remembering_a_hang():
            try:
                return self.pool.run(function, world, *args, timeout_s=self.job_s)
            except OSError:  # a rank ended between two jobs, for example because of the earlier job
                self.pool.close()
                return self.pool.run(function, world, *args, timeout_s=self.job_s)

    def moved(self, case: DispatchCase) -> list[Moved]:
        """Each rank's results of a case; run once for all checks."""
        results: list[Moved] = self._once(("moved", case), lambda: self.ranks(moved, case))
        return results

    def holds(self, cases: Sequence[DispatchCase], *assertions: assertions.Assertion) -> None:
        """Fail with the first fault that an assertion finds in the ranks' results; skip if every case is refused."""

        def look(case: DispatchCase) -> str | None:
            ranks = self.moved(case)
            return next(filter(None, (assertion(case, ranks) for assertion in assertions)), None)

        self.each(cases, look)

    def each(self, cases: Sequence[DispatchCase], look: Callable[[DispatchCase], str | None]) -> None:
        """Fail with the first fault of the cases; skip if the plugin refuses every one."""
        refusals: list[str] = []
        for case in cases:
            try:
                fault = self.fault(case, look)
            except RefusedError as refusal:
                refusals.append(str(refusal))
                continue
            if fault:
                fail(f"{self.plugin.name}: {fault}")
        if len(refusals) == len(cases):
            why = refusals[0] if refusals else "no world of the profile has room for it"
            pytest.skip(f"{self.plugin.name} refuses: {why}")

    def fault(self, case: DispatchCase, look: Callable[[DispatchCase], str | None]) -> str | None:
        """Sentence of a fault that ``look`` finds or ranks raise, with its case."""
        case = evolve(case, ordered=self.ordered)
        try:
            fault = look(case)
        except FaultError as crashed:
            return str(crashed)
        return f"{fault}. With {case}." if fault else None

    def twice(self, case: DispatchCase) -> list[tuple[Moved, Moved]]:
        """Each rank's results of the first and the third movement on one dispatcher."""
        pairs: list[tuple[Moved, Moved]] = self.ranks(moved_twice, case)
        return pairs


def _on_threads(
    function: Callable[..., Any], case: DispatchCase, assembly: Assembly, how: Mapping[str, Any], timeout_s: float
) -> list[Any]:
    def run(group: Any, rank: int) -> Any:
        return function(group, rank, case, assembly, **how)

    with poisoned_memory():
        return thread_world(case.world, run, timeout_s=timeout_s)


def _on_gloo(function: Callable[..., Any], layer_case: LayerCase, case: DispatchCase, how: Mapping[str, Any]) -> Any:
    with poisoned_memory():
        return function(dist.group.WORLD, dist.get_rank(), case, layer_case.assemble(), **how)


def crash(error: BaseException) -> str:
    """Sentence for an exception of a rank, with the last lines of its traceback."""
    message = str(error)
    if isinstance(error, ContractError):
        if "different collectives" in message or "did not come to" in message:
            return f"the ranks do not make the same collectives in the same order, and would hang: {message}"
        if "which awaits" in message:
            return f"the ranks disagree about what they send each other: {message}"
        if FRAME in message:
            return _raised(message)
        if "came to no collective" in message:
            return f"the ranks hang: {message}"
        if "no answer in time" in message:
            return f"the ranks hang: some wait for a collective that others do not make: {message}"
        return f"a rank fails: {message[-1500:]}"
    where = " ".join(getattr(error, "__notes__", []))
    lines = traceback.format_exception(error)[-4:] if not isinstance(error, MoefwError) else []
    return f"raises {type(error).__name__}: {message} {where}\n{''.join(lines)}"


def _raised(message: str) -> str:
    """Sentence for the first exception that is not a consequence of another rank's end."""
    blocks = re.split(r"^(?=rank \d+: )", message, flags=re.MULTILINE)
    failed = [block.rstrip() for block in blocks if FRAME in block]
    cause = next((block for block in failed if not any(words in block for words in GONE)), failed[0])
    sentence, frame, lines = cause.partition(FRAME)
    rank, _, raised = sentence.partition(": ")
    return f"raises {raised} ({rank}){frame}{lines}\n"
