"""The training run: steps, evaluations and checkpoints."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch._dynamo
from attrs import evolve
from rich.console import Console

from moefw.compose.assembly import Assembly
from moefw.compose.optimizer import build_optimizer
from moefw.compose.pretrained import read_weights
from moefw.compose.routes import ROUTES
from moefw.core.data import TOKENIZER
from moefw.core.errors import MoefwError, Problem, RunError
from moefw.core.stages import Batch
from moefw.models.huggingface.beside import CHAT, hand_on
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
from moefw.training.folder import kept_spec
from moefw.training.forecast import Forecast
from moefw.training.full_disk import RunFiles
from moefw.training.host_pages import return_free_pages
from moefw.training.learning_rate import learning_rate
from moefw.training.model_flops import ModelFlops
from moefw.training.progress import Evaluation, Progress
from moefw.training.records.ending import Outcome, reason_of
from moefw.training.records.events import EVENTS, Event, last_layout
from moefw.training.records.origins import ORIGINS, write_origins
from moefw.training.records.run_log import RunLog
from moefw.training.report import conclude, introduce, say
from moefw.training.resolved_spec import write_resolved
from moefw.training.resume import Which
from moefw.training.routes.of_a_run import Routes
from moefw.training.run_facts import computing_name, facts, peak_memory
from moefw.training.session import Session, lost_a_rank, open_session
from moefw.training.step_record import record_of
from moefw.training.what_trains import parameters_of, require_sensible_freeze
from moefw.training.world import Place
from moefw_kernels.devices import is_gpu

if TYPE_CHECKING:
    from moefw.tracing.options import TraceOptions
    from moefw.training.step_traces import StepTraces

LEDGER_STEPS = 3
"""Steps after which a GPU has reached its peak: the optimizer's states exist from the first step on."""


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
    ``requests``: the signals that make
    the run save and raise StoppedError at the end of a step; None: there are none.
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
        spec = session.assembly.spec.train
        require_sensible_freeze(session)
        self.session = session
        self.spec = spec
        self.requests = requests or StopRequests(resumable=lambda: resume is not None)
        self.run_dir = Path(assembly.spec.run.dir)
        with assembly.registry.calling(assembly.parts.optimizer, "build()"):
            optimizer = build_optimizer(assembly, session.model, session.layout, session.device, session.shared)
        self.console = Console(quiet=not session.leads)
        self.saver = checkpoint.Saver(
            self.run_dir,
            session.model,
            optimizer,
            session.layout,
            keep=spec.keep_checkpoints,
            keep_every=spec.keep_every,
        )
        tell = partial(say, self.console)
        self.engine = Engine.of(session.model, optimizer, session.layout, spec, beside=self.saver, tell=tell)
        self.spikes = LossSpikes(spec.loss_spike)
        self.feed = feed_of(session)
        evaluation_starts(session)
        self.clock = StepClock()
        self.log = RunLog()
        self.files = RunFiles(spec.on_full_disk, tell, self._full_disk)
        self.ledger = ledger and session.leads and is_gpu(session.device)
        self.host_group = session.layout.host_group()
        self.base = checkpoint.base_of(session.assembly, session.layout)
        self.saved = Path()
        self.resumes = resume is not None
        self.notes: list[str] = []
        self.resumed: Path | None = None
        self.not_carried_on: dict[str, dict[str, int]] = {}
        self.start = self._resume(resume)
        self.done = self.start
        self.forecast = Forecast(spec, start=self.start)
        self.traces = self._traces(traces)
        self.routes = Routes.opened(session, self.start)
        self.model_flops = ModelFlops(
            ledger_file.path_of(assembly),
            ranks=session.layout.plan.world,
            name=computing_name(session.device),
        )

    def run(self) -> None:
        """Train to the last step."""
        parameters = parameters_of(self.session)
        about = facts(self.session, parameters)
        with self.log, self._recorded_end(), self.traces or nullcontext():
            changes = self._open_files(about)
            with Progress(total_steps=self.spec.steps, start_step=self.start, console=self.console) as progress:
                introduce(self.session, parameters, self.start, [*self.notes, *changes], self.console)
                if self.forecast.rehearsals:
                    self._rehearse()
                self.requests.mode = "defer"
                with self._last_save_settled():
                    for step in range(self.start, self.spec.steps):
                        self._step_of_run(step, progress)
            self.requests.mode = "finish"
            self.log.end_window()
            conclude(self.session, self.run_dir, self.clock, self.console)

    def _rehearse(self) -> None:
        """Run the first step a few times without its update, and tell how long the run will take. Collective."""
        seconds = []
        with self.clock.aside("rehearsal"):  # it is no part of the first step's record
            for _ in range(self.forecast.rehearsals):
                stamp("rehearsal", step=self.start + 1)
                began = time.perf_counter()
                clock = StepClock()
                self.engine.rehearse(self._batches(self.start, clock), clock)
                seconds.append(time.perf_counter() - began)
        say(self.console, self.forecast.rehearsed(seconds))

    def _step_of_run(self, step: int, progress: Progress) -> None:
        """Train one step, record and show it, and save or stop after it if that is due."""
        record, result = self._step(step)
        stamp("metrics")
        self.log.step(record, result.layers, result.load_LE)
        self.done = step + 1
        shown = {key: record[key] for key in ("loss", "tokens_per_s", "load_max_over_mean", "lr")}
        progress.update(
            step + 1,
            **shown,
            model_tflops_per_gpu=record.get("model_tflops_per_gpu"),
            mfu=record.get("mfu"),
            evaluation=Evaluation.of(record),
        )
        if self.ledger and step == self.start and step + 1 < self.spec.steps:
            # The first step tunes kernels, between whose runs Triton writes over the caches of the GPU.
            torch.cuda.reset_peak_memory_stats(self.session.device)
        if self.ledger and step + 1 == min(self.start + LEDGER_STEPS, self.spec.steps):
            progress.note(self._measured())
        if result.votes.decided(self.session.layout.plan.world):
            self._settle()
        if self._due(step, self.spec.checkpoint_every):
            self._settle()
            self._save(step)
        if step + 1 < self.spec.steps and anywhere(self.requests.asked is not None, self.host_group):
            self._stop(step)

    def _open_files(self, about: Mapping[str, Any]) -> list[str]:
        """Write spec, origins and tokenizer, open the log, and record the start, with what is known ``about`` the run.

        Return the changes in the spec of a resumed run.
        """
        if not self.session.leads:
            return []
        stamp("opening the run's files", slow=True)
        assembly = self.session.assembly
        changes: list[str] = []
        layout_before = last_layout(self.run_dir / EVENTS)
        with self.files.writing(self.run_dir / "spec.yaml"):
            self.run_dir.mkdir(parents=True, exist_ok=True)
            changes = write_resolved(assembly, self.run_dir)
        with self.files.writing(self.run_dir / ORIGINS):
            write_origins(self.run_dir / ORIGINS, assembly.origins.of(kept_spec(assembly)))
        with self.files.writing(self.run_dir / TOKENIZER):
            self.session.data.save_tokenizer(self.run_dir)
            if self.spec.weights is not None:
                for name in CHAT:
                    if not (self.run_dir / name).exists():  # the data may have one of their own
                        hand_on(Path(self.spec.weights) / name, self.run_dir / name)
        self.log.open(self.run_dir, keep_until=self.start if self.resumes else None, writing=self.files.writing)
        if self.resumed is None:
            self.log.event("start", self.start, **about)
        else:
            more = {"checkpoint": self._relative(self.resumed), "lost_steps": self.log.lost_steps}
            more |= {"layout_before": layout_before, "changes": changes, **self.not_carried_on}
            self.log.event("resume", self.start, **about, **more)
        return changes

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

    @contextmanager
    def _last_save_settled(self) -> Iterator[None]:
        """Commit what is saved beside steps also if the code inside fails, where it fails on every rank."""
        try:
            yield
        except MoefwError as error:
            if error.on_every_rank:
                with suppress(MoefwError):  # the first failure is reported
                    self._settle()
            raise

    def _end(self, outcome: Outcome, error: Exception | None = None) -> None:
        reason = "" if error is None else reason_of(error)
        self.log.attempt("end", self.done, outcome=outcome, reason=reason, memory=peak_memory(self.session.device))

    def _full_disk(self, path: Path, reason: str) -> None:
        self.log.attempt("full_disk", self.done, path=self._relative(path), reason=reason)

    def _relative(self, path: Path) -> str:
        """A path in the run's folder, relative to it."""
        return str(path.relative_to(self.run_dir))

    def _stop(self, step: int) -> NoReturn:
        """Save after ``step``, unless it is saved already, and raise StoppedError, with a message on one rank only."""
        self.requests.mode = "finish"
        folder = self.run_dir / "checkpoints" / f"step-{step + 1}"
        self._settle()
        if self.saved != folder:
            self._save_now(step)
        said = Problem(f"stopped by a signal after step {step + 1}, saved as {folder}.", "Continue with --resume.")
        self.log.event("stop", step + 1, reason=str(said), checkpoint=self._relative(folder))
        raise StoppedError([said] if self.session.leads else [])

    def _measured(self) -> str:
        """Write the peak GPU memory so far into the ledger, and return a line about it."""
        peak = torch.cuda.max_memory_allocated(self.session.device)
        ledger_file.write(self.session.assembly, measured={"peak": peak, "allocator": "cuda"})
        return f"the GPU has allocated at most {peak / 2**30:.4f} GiB"

    def _step(self, step: int) -> tuple[dict[str, Any], StepResult]:
        """Train one step, evaluate if due, and return its record for ``metrics.jsonl``, and its result."""
        stamp("observers", step=step + 1)
        self._notify("moefw_before_step", step)
        began = time.perf_counter()
        batches = self._batches(step, self.clock)
        lr = learning_rate(self.session.assembly, step)
        try:
            with self._traced(step + 1) as clock:
                result = self.engine.step(batches, lr, clock, number=step + 1)
        except BadStateError as error:
            (problem,) = error.problems
            self._settle()
            back = checkpoint.way_back(self.run_dir, self.host_group)
            raise RunError(problem.what, f"{problem.fix} {back}", on_every_rank=True) from error
        with self.files.writing(self.run_dir / ROUTES):
            self.routes.record(step + 1, batches, result.routes)
        record = record_of(step, lr, result) | self.saver.metrics()
        spike = self.spikes.warning(step + 1, result.loss)
        if spike:
            record[LOSS_SPIKES] = 1
            self._tell("loss_spike", step, spike)
        if result.note:
            self._tell("rerun_step" if RERUN_STEPS in result.counts else "skipped_step", step, result.note)
        step_s = time.perf_counter() - began
        record["tokens_per_s"] = result.tokens / step_s
        if self.session.leads:  # the others write no metrics
            # Tokens without a loss are computed, too.
            record |= self.model_flops.of(self.spec.tokens_per_step / step_s)
        if forecast := self.forecast.after(step_s):
            say(self.console, forecast)
        if self._due(step, self.spec.eval_every):
            record |= self._evaluate(step)
        record["seconds"] = {section: round(seconds, 6) for section, seconds in self.clock.step_done().items()}
        stamp("observers")
        self._notify("moefw_after_step", step, metrics=record)
        return record, result

    def _batches(self, step: int, clock: Clock) -> list[Batch]:
        """This rank's micro-batches of a step (from 0), with the routes that are replayed. Collective."""
        with clock("data"):
            batches = list(self.feed.micro_batches(step))
        return self.routes.given(step + 1, batches)

    def _traces(self, options: TraceOptions | None) -> StepTraces | None:
        """What traces steps of this run; None: nothing does. Raises PlanError if it does not have these steps."""
        if options is None:
            return None
        from moefw.training.step_traces import StepTraces  # it imports what records a step, for a second

        steps = options.steps_of(self.start, self.spec.steps)
        return StepTraces(self.session, options, steps, self.host_group, tell=partial(say, Console()))

    def _traced(self, number: int) -> AbstractContextManager[Clock]:
        """Context of a step, traced if it is to be. Yields the clock that the engine is given."""
        if self.traces is None:
            return nullcontext(self.clock)
        return self.traces.step(number, self.clock, self.engine.optimizer)

    def _tell(self, event: Event, step: int, reason: str) -> None:
        """Print a line about a step, and record it."""
        say(self.console, reason)
        self.log.event(event, step + 1, reason=reason)

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

    def _due(self, step: int, every: int) -> bool:
        """Whether an action with period ``every``, which also follows the last step, is due after ``step``."""
        return step + 1 == self.spec.steps or (every > 0 and (step + 1) % every == 0)

    def _save(self, step: int) -> None:
        """Save a checkpoint after a step: begin it beside the steps that follow, or make it, if it is the last one or
        training waits. Collective.
        """
        last = step + 1 == self.spec.steps
        if self.spec.checkpoint == "async" and not last:
            with self.clock.aside("checkpoint"):
                self.saver.begin(step + 1, self._origin(step))
            return
        # A failure at a run's last checkpoint raises under any ``on_full_disk``.
        with nullcontext() if last else self.files.writing(self.run_dir / "checkpoints"):
            self._save_now(step)

    def _save_now(self, step: int) -> None:
        """Save a checkpoint after a step, and record it. Collective."""
        with self.clock.aside("checkpoint"):
            saved = self.saver.save(step + 1, self._origin(step))
            return_free_pages()
        self._record_saved(saved)

    def _settle(self) -> None:
        """Wait for the save that goes on beside steps, if there is one, and record its checkpoint. Collective."""
        if not self.saver.goes_on:
            return
        with self.files.writing(self.run_dir / "checkpoints"):
            with self.clock.aside("checkpoint"):
                saved = self.saver.settled()
                return_free_pages()
            self._record_saved(saved)

    def _record_saved(self, saved: checkpoint.Saved) -> None:
        self.saved = saved.folder
        path = self._relative(saved.folder)
        self.log.event("checkpoint", saved.step, path=path, seconds=round(saved.blocked_s, 6), bytes=saved.nbytes)
        say(self.console, f"saved {saved.folder}")

    def _origin(self, step: int) -> checkpoint.Origin:
        """What a checkpoint after a step says of the run that saves it."""
        session = self.session
        return checkpoint.Origin(
            world=session.layout.plan.world,
            plugins=tuple(tuple(version) for version in session.assembly.versions()),
            tokenizer=session.data.fingerprint,
            sequences=self.feed.order.first(step + 1),
            base=self.base,
        )

    def _resume(self, which: Which | None) -> int:
        """Load the checkpoint that all ranks resume from and return its step; 0 if they start anew."""
        data = self.session.data
        group = self.host_group
        chosen = checkpoint.choose_together(self.run_dir, which, data, group)
        if chosen is None:
            self._read_weights()
            return 0
        if self.base is not None:
            self._read_weights(frozen_alone=True)
        model = self.session.model
        optimizer = self.engine.optimizer
        fingerprint = data.fingerprint
        loaded = checkpoint.load(
            chosen.folder,
            model,
            optimizer,
            tokenizer=fingerprint,
            base=self.base,
            fresh_optimizer=self.spec.fresh_optimizer,
            group=group,
        )
        manifest = loaded.manifest
        begin = manifest.origin.sequences - self.feed.order.first(manifest.step)
        order: Any = evolve(self.feed.order, begin=begin)
        self.feed = evolve(self.feed, order=order)
        if self.session.leads:
            set_aside = checkpoint.set_aside_after(self.run_dir, manifest.step)
            self.notes = [*chosen.passed, *set_aside, *loaded.differences.notes(chosen.folder.name)]
        self.not_carried_on = loaded.differences.counts()
        self.resumed = chosen.folder
        return manifest.step

    def _read_weights(self, *, frozen_alone: bool = False) -> None:
        """Read the weights of a Hugging Face folder, or the frozen ones, if the spec names one. Collective."""
        if self.spec.weights is not None:
            stamp("reading weights", slow=True)
            session = self.session
            folder = Path(self.spec.weights)
            read_weights(session.model, folder, session.assembly, self.host_group, frozen_alone=frozen_alone)
