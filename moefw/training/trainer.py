"""The training run: steps, evaluations and checkpoints."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch._dynamo  # noqa: F401 - the first optimizer imports it, for a second: here no rank waits for another
from rich.console import Console

from moefw.compose.assembly import Assembly
from moefw.compose.optimizer import build_optimizer
from moefw.compose.routes import ROUTES
from moefw.core.errors import Problem, RunError
from moefw.core.stages import Batch
from moefw.runtime.communication.agreement import anywhere
from moefw.system.stamps import stamp
from moefw.training import checkpoint, ledger_file
from moefw.training.clock import Clock, StepClock
from moefw.training.engine import Engine, StepResult
from moefw.training.errors import LostContactError, StoppedError
from moefw.training.evaluation import evaluation, evaluation_starts, zlib_bits_per_byte
from moefw.training.faults.bad_step import RERUN_STEPS, BadStateError
from moefw.training.faults.kernel import is_out_of_memory
from moefw.training.faults.loss_spike import LOSS_SPIKES, LossSpikes
from moefw.training.faults.requests import StopRequests
from moefw.training.feed import feed_of
from moefw.training.forecast import Forecast
from moefw.training.full_disk import RunFiles
from moefw.training.learning_rate import learning_rate
from moefw.training.measured_peak import MeasuredPeak
from moefw.training.model_flops import ModelFlops
from moefw.training.opening import open_files
from moefw.training.periods import is_due
from moefw.training.progress import Evaluation, Progress
from moefw.training.records.ending import Outcome, reason_of
from moefw.training.records.events import Event
from moefw.training.records.run_log import RunLog
from moefw.training.report import conclude, introduce, say
from moefw.training.resume import Which
from moefw.training.routes.of_a_run import Routes
from moefw.training.run_checkpoints import RunCheckpoints
from moefw.training.run_facts import computing_name, facts, peak_memory
from moefw.training.session import Session, lost_a_rank, open_session
from moefw.training.start import start_of
from moefw.training.step_record import record_of
from moefw.training.what_trains import parameters_of, require_sensible_freeze
from moefw.training.world import Place
from moefw_kernels.devices import is_gpu

if TYPE_CHECKING:
    from moefw.tracing.options import TraceOptions
    from moefw.training.step_traces import StepTraces


def train(
    assembly: Assembly,
    place: Place,
    *,
    resume: Which | None,
    ledger: bool = False,
    traces: TraceOptions | None = None,
    requests: StopRequests | None = None,
) -> None:
    """Train as the assembly says, from the start or from a checkpoint of the run's folder. Collective.

    ``ledger``: write the peak GPU memory of the first steps into the run's ledger. ``traces``: the steps to trace.
    ``requests``: the signals that make the run save and raise StoppedError at the end of a step; None: there are none.
    """
    with open_session(assembly, place) as session:
        Trainer(session, resume=resume, ledger=ledger, traces=traces, requests=requests).run()


class Trainer:
    """One run on this rank. Raises DataError if there is too little text, CheckpointError if it cannot resume."""

    def __init__(
        self,
        session: Session,
        *,
        resume: Which | None,
        ledger: bool = False,
        traces: TraceOptions | None = None,
        requests: StopRequests | None = None,
    ) -> None:
        assembly = session.assembly
        spec = assembly.spec.train
        require_sensible_freeze(session)
        self.session = session
        self.spec = spec
        self.requests = requests or StopRequests(resumable=lambda: resume is not None)
        with assembly.registry.calling(assembly.parts.optimizer, "build()"):
            optimizer = build_optimizer(assembly, session.model, session.layout, session.device, session.shared)
        self.console = Console(quiet=not session.leads)
        tell = partial(say, self.console)
        saver = checkpoint.Saver(
            session.run_dir,
            session.model,
            optimizer,
            session.layout,
            keep=spec.keep_checkpoints,
            keep_every=spec.keep_every,
        )
        self.engine = Engine.of(session.model, optimizer, session.layout, spec, beside=saver, tell=tell)
        self.spikes = LossSpikes(spec.loss_spike)
        feed = feed_of(session)
        evaluation_starts(session)
        self.clock = StepClock()
        self.log = RunLog()
        self.files = RunFiles(spec.on_full_disk, tell, self._full_disk)
        self.host_group = session.layout.host_group()
        base = checkpoint.base_of(assembly, session.layout)
        self.start = start_of(session, optimizer, feed, which=resume, base=base)
        self.done = self.start.step
        """Number of steps that are done."""
        self.checkpoints = RunCheckpoints(
            session,
            saver,
            feed=self.start.feed,
            base=base,
            log=self.log,
            files=self.files,
            clock=self.clock,
            tell=tell,
        )
        measures = ledger and session.leads and is_gpu(session.device)
        self.peak = MeasuredPeak(session, start=self.done) if measures else None
        self.forecast = Forecast(spec, start=self.done)
        self.traces = self._traces(traces)
        self.routes = Routes.opened(session, self.done)
        self.model_flops = ModelFlops(
            ledger_file.path_of(assembly),
            ranks=session.layout.plan.world,
            name=computing_name(session.device),
        )

    def run(self) -> None:
        """Train to the last step."""
        start = self.start.step
        parameters = parameters_of(self.session)
        about = facts(self.session, parameters)
        with self.log, self._recorded_end(), self.traces or nullcontext():
            changes = open_files(self.session, self.start, self.log, self.files, about)
            with Progress(total_steps=self.spec.steps, start_step=start, console=self.console) as progress:
                introduce(self.session, parameters, start, [*self.start.notes, *changes], self.console)
                if self.forecast.rehearsals:
                    self._rehearse()
                self.requests.mode = "defer"
                with self.checkpoints.settled_at_failure():
                    for step in range(start, self.spec.steps):
                        self._step_of_run(step, progress)
            self.requests.mode = "finish"
            self.log.end_window()
            conclude(self.session, self.session.run_dir, self.clock, self.console)

    def _step_of_run(self, step: int, progress: Progress) -> None:
        """Train one step, record and show it, and save or stop after it if that is due."""
        record, result = self._step(step)
        stamp("metrics")
        self.log.step(record, result.layers, result.load_LE)
        self.done = step + 1
        self._show(record, progress)
        if self.peak is not None and (line := self.peak.after(step)):
            progress.note(line)
        self.checkpoints.after_step(step, result.votes)
        if self.done < self.spec.steps and anywhere(self.requests.asked is not None, self.host_group):
            self._stop(step)

    def _step(self, step: int) -> tuple[dict[str, Any], StepResult]:
        """Train one step, evaluate if due, and return its record for ``metrics.jsonl``, and its result."""
        stamp("observers", step=step + 1)
        self._notify("moefw_before_step", step)
        began = time.perf_counter()
        batches = self._batches(step, self.clock)
        lr = learning_rate(self.session.assembly, step)
        result = self._trained(step, batches, lr)
        with self.files.writing(self.session.run_dir / ROUTES):
            self.routes.record(step + 1, batches, result.routes)
        record = record_of(step, lr, result) | self.checkpoints.metrics()
        if spike := self.spikes.warning(step + 1, result.loss):
            record[LOSS_SPIKES] = 1
            self._tell("loss_spike", step, spike)
        if result.note:
            self._tell("rerun_step" if RERUN_STEPS in result.counts else "skipped_step", step, result.note)
        step_s = time.perf_counter() - began
        record |= self._rates(result, step_s)
        if forecast := self.forecast.after(step_s):
            say(self.console, forecast)
        if is_due(self.spec, step, every=self.spec.eval_every):
            record |= self._evaluate(step)
        record["seconds"] = {section: round(seconds, 6) for section, seconds in self.clock.step_done().items()}
        stamp("observers")
        self._notify("moefw_after_step", step, metrics=record)
        return record, result

    def _batches(self, step: int, clock: Clock) -> list[Batch]:
        """This rank's micro-batches of a step (from 0), with the routes that are replayed. Collective."""
        with clock("data"):
            batches = list(self.start.feed.micro_batches(step))
        return self.routes.given(step + 1, batches)

    def _trained(self, step: int, batches: Sequence[Batch], lr: float) -> StepResult:
        """Result of a step of the engine, traced if it is to be. Collective.

        Raises RunError on all ranks, with advice where to go on from, if the states are bad.
        """
        try:
            with self._traced(step) as clock:
                return self.engine.step(batches, lr, clock, number=step + 1)
        except BadStateError as error:
            (problem,) = error.problems
            back = self.checkpoints.way_back()
            raise RunError(problem.what, f"{problem.fix} {back}", on_every_rank=True) from error

    def _traced(self, step: int) -> AbstractContextManager[Clock]:
        """Block of a step, traced if it is to be. Yields the clock that the engine is given."""
        if self.traces is None:
            return nullcontext(self.clock)
        return self.traces.step(step + 1, self.clock, self.engine.optimizer)

    def _tell(self, event: Event, step: int, reason: str) -> None:
        """Print a line about a step, and record it."""
        say(self.console, reason)
        self.log.event(event, step + 1, reason=reason)

    def _rates(self, result: StepResult, step_s: float) -> dict[str, float]:
        """What the record of a step of ``step_s`` seconds says of its speed."""
        rates = {"tokens_per_s": result.tokens / step_s}
        if self.session.leads:  # the others write no metrics
            # Tokens without a loss are computed, too.
            rates |= self.model_flops.of(self.spec.tokens_per_step / step_s)
        return rates

    def _evaluate(self, step: int) -> dict[str, float]:
        """Evaluate after a step, and record it. Collective."""
        with self.clock.aside("evaluation") as aside:
            values = evaluation(self.session)
            zlib_bits = self.zlib_bits if self.session.leads else 0.0
        self.log.event(
            "evaluation",
            step + 1,
            loss=values["eval_loss"],
            bits_per_byte=values.get("eval_bits_per_byte"),
            zlib_bits_per_byte=zlib_bits,
            seconds=round(aside.seconds, 6),
        )
        return values

    @cached_property
    def zlib_bits(self) -> float:
        """Bits in which zlib writes a byte of the held-out text, with which evaluations are compared."""
        return zlib_bits_per_byte(self.session.data.heldout_bytes)

    def _notify(self, hook: str, step: int, **arguments: Any) -> None:
        """Call the observers of a hook."""
        place = f"{hook}, step {step + 1}, rank {self.session.layout.rank}"
        self.session.assembly.registry.notify(hook, place=place, step=step, **arguments)

    def _show(self, record: Mapping[str, Any], progress: Progress) -> None:
        """Show a step that is done."""
        shown = {key: record[key] for key in ("loss", "tokens_per_s", "load_max_over_mean", "lr")}
        progress.update(
            self.done,
            **shown,
            model_tflops_per_gpu=record.get("model_tflops_per_gpu"),
            mfu=record.get("mfu"),
            evaluation=Evaluation.of(record),
        )

    def _stop(self, step: int) -> NoReturn:
        """Save after ``step``, unless it is saved already, and raise StoppedError, with a message on one rank only."""
        self.requests.mode = "finish"
        folder = self.checkpoints.save_to_stop(step)
        said = Problem(f"stopped by a signal after step {step + 1}, saved as {folder}.", "Continue with --resume.")
        self.log.event("stop", step + 1, reason=str(said), checkpoint=self.session.in_run_dir(folder))
        raise StoppedError([said] if self.session.leads else [])

    def _rehearse(self) -> None:
        """Run the first step a few times without its update, and tell how long the run will take. Collective."""
        first = self.start.step
        seconds = []
        with self.clock.aside("rehearsal"):  # it is no part of the first step's record
            for _ in range(self.forecast.rehearsals):
                stamp("rehearsal", step=first + 1)
                began = time.perf_counter()
                clock = StepClock()
                self.engine.rehearse(self._batches(first, clock), clock)
                seconds.append(time.perf_counter() - began)
        say(self.console, self.forecast.rehearsed(seconds))

    def _traces(self, options: TraceOptions | None) -> StepTraces | None:
        """What traces steps of this run; None: nothing does. Raises PlanError if it does not have these steps."""
        if options is None:
            return None
        from moefw.training.step_traces import StepTraces  # it imports what records a step, for a second

        steps = options.steps_of(self.start.step, self.spec.steps)
        return StepTraces(self.session, options, steps, self.host_group, tell=partial(say, Console()))

    @contextmanager
    def _recorded_end(self) -> Iterator[None]:
        """Record how the code inside ends. What this rank alone cannot tell is left to the process that watches it."""
        try:
            yield
        except StoppedError as error:
            self._end("stopped", error)
            raise
        except Exception as error:
            if not (is_out_of_memory(error) or isinstance(error, LostContactError) or lost_a_rank(error)):
                self._end("failed", error)
            raise
        self._end("done")

    def _end(self, outcome: Outcome, error: Exception | None = None) -> None:
        reason = "" if error is None else reason_of(error)
        self.log.attempt("end", self.done, outcome=outcome, reason=reason, memory=peak_memory(self.session.device))

    def _full_disk(self, path: Path, reason: str) -> None:
        self.log.attempt("full_disk", self.done, path=self.session.in_run_dir(path), reason=reason)
