"""The training run: steps, evaluations and checkpoints."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch._dynamo
from attrs import evolve
from rich.console import Console

from moefw.compose.assembly import Assembly
from moefw.compose.optimizer import build_optimizer
from moefw.compose.pretrained import read_weights
from moefw.compose.routes import ROUTES
from moefw.core.data import TOKENIZER
from moefw.core.errors import Problem, RunError
from moefw.runtime.communication.agreement import anywhere
from moefw.system.stamps import stamp
from moefw.training import checkpoint, ledger_file
from moefw.training.clock import StepClock
from moefw.training.engine import Engine, StepResult
from moefw.training.errors import StoppedError
from moefw.training.evaluation import evaluation, evaluation_starts
from moefw.training.faults.bad_step import BadStateError
from moefw.training.faults.loss_spike import LOSS_SPIKES, LossSpikes
from moefw.training.faults.requests import StopRequests
from moefw.training.feed import feed_of
from moefw.training.full_disk import RunFiles
from moefw.training.host_pages import return_free_pages
from moefw.training.learning_rate import learning_rate
from moefw.training.progress import Progress
from moefw.training.records.run_log import RunLog
from moefw.training.report import conclude, introduce, say
from moefw.training.resolved_spec import write_resolved
from moefw.training.resume import Which
from moefw.training.routes.of_a_run import Routes
from moefw.training.session import Session, open_session
from moefw.training.step_record import record_of
from moefw.training.world import Place
from moefw_kernels.devices import is_gpu

LEDGER_STEPS = 2
"""Steps after which a GPU has reached its peak: the optimizer's states exist from the first step on."""


def train(
    assembly: Assembly,
    place: Place,
    *,
    resume: Which | None,
    ledger: bool = False,
    requests: StopRequests | None = None,
) -> None:
    """Train as the assembly says, from the start or from a checkpoint of the run's folder. Collective.

    ``ledger``: write the peak GPU memory of the first steps into the run's ledger. ``requests``: the signals that make
    the run save and raise StoppedError at the end of a step; None: there are none.
    """
    with open_session(assembly, place) as session:
        Trainer(session, resume=resume, ledger=ledger, requests=requests).run()


class Trainer:
    """One run on this rank. Raises DataError if there is too little text, CheckpointError if it cannot resume."""

    def __init__(
        self, session: Session, *, resume: Which | None, ledger: bool = False, requests: StopRequests | None = None
    ) -> None:
        assembly = session.assembly
        spec = session.assembly.spec.train
        self.session = session
        self.spec = spec
        self.requests = requests or StopRequests(resumable=lambda: resume is not None)
        self.run_dir = Path(assembly.spec.run.dir)
        with assembly.registry.calling(assembly.parts.optimizer, "build()"):
            optimizer = build_optimizer(assembly, session.model, session.layout, session.device, session.shared)
        self.engine = Engine.of(session.model, optimizer, session.layout, spec)
        self.spikes = LossSpikes(spec.loss_spike)
        self.feed = feed_of(session)
        evaluation_starts(session)
        self.clock = StepClock()
        self.console = Console(quiet=not session.leads)
        self.files = RunFiles(spec.on_full_disk, partial(say, self.console))
        self.ledger = ledger and session.leads and is_gpu(session.device)
        self.host_group = session.layout.host_group()
        self.saved = Path()
        self.resumes = resume is not None
        self.notes: list[str] = []
        self.start = self._resume(resume)
        self.routes = Routes.opened(session, self.start)

    def run(self) -> None:
        """Train to the last step."""
        log, changes = self._open_files()
        with (
            log,
            Progress(total_steps=self.spec.steps, start_step=self.start, console=self.console) as progress,
        ):
            introduce(self.session, self.start, [*self.notes, *changes], self.console)
            self.requests.mode = "defer"
            for step in range(self.start, self.spec.steps):
                record, result = self._step(step)
                stamp("metrics")
                log.step(record, result.layers, result.load_LE)
                shown = {key: record[key] for key in ("loss", "tokens_per_s", "load_max_over_mean", "lr")}
                progress.update(step + 1, **shown, eval_bits_per_byte=record.get("eval_bits_per_byte"))
                if self.ledger and step + 1 == min(self.start + LEDGER_STEPS, self.spec.steps):
                    progress.note(self._measured())
                if self._due(step, self.spec.checkpoint_every):
                    with self.clock("checkpoint"), self._writing_checkpoint(step):
                        progress.note(f"saved {self._save(step)}")
                        return_free_pages()
                if step + 1 < self.spec.steps and anywhere(self.requests.asked is not None, self.host_group):
                    self._stop(step)
                self.clock.step_done()
        self.requests.mode = "finish"
        conclude(self.session, self.run_dir, self.clock, self.console)

    def _open_files(self) -> tuple[RunLog, list[str]]:
        """Write the spec and the tokenizer; return the log of the run and the changes in the spec of a resumed one."""
        if not self.session.leads:
            return RunLog(None, keep_until=None, writing=self.files.writing), []
        stamp("opening the run's files", slow=True)
        changes: list[str] = []
        with self.files.writing(self.run_dir / "spec.yaml"):
            self.run_dir.mkdir(parents=True, exist_ok=True)
            changes = write_resolved(self.session.assembly, self.run_dir)
        with self.files.writing(self.run_dir / TOKENIZER):
            self.session.data.save_tokenizer(self.run_dir)
        keep_until = self.start if self.resumes else None
        return RunLog(self.run_dir, keep_until=keep_until, writing=self.files.writing), changes

    def _stop(self, step: int) -> NoReturn:
        """Save after ``step``, unless it is saved already, and raise StoppedError, with a message on one rank only."""
        self.requests.mode = "finish"
        folder = self.run_dir / "checkpoints" / f"step-{step + 1}"
        if self.saved != folder:
            self._save(step)
        said = Problem(f"stopped by a signal after step {step + 1}, saved as {folder}.", "Continue with --resume.")
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
        with self.clock("data"):
            batches = list(self.feed.micro_batches(step))
        batches = self.routes.given(step + 1, batches)
        lr = learning_rate(self.session.assembly, step)
        try:
            result = self.engine.step(batches, lr, self.clock, number=step + 1)
        except BadStateError as error:
            (problem,) = error.problems
            back = checkpoint.way_back(self.run_dir, self.host_group)
            raise RunError(problem.what, f"{problem.fix} {back}", on_every_rank=True) from error
        with self.files.writing(self.run_dir / ROUTES):
            self.routes.record(step + 1, batches, result.routes)
        record = record_of(step, lr, result)
        spike = self.spikes.warning(step + 1, result.loss)
        if spike:
            record[LOSS_SPIKES] = 1
        for note in filter(None, (result.note, spike)):
            say(self.console, note)
        record["tokens_per_s"] = result.tokens / (time.perf_counter() - began)
        if self._due(step, self.spec.eval_every):
            with self.clock.aside("evaluation"):
                record |= evaluation(self.session)
        stamp("observers")
        self._notify("moefw_after_step", step, metrics=record)
        return record, result

    def _notify(self, hook: str, step: int, **arguments: Any) -> None:
        """Call the observers of a hook."""
        place = f"{hook}, step {step + 1}, rank {self.session.layout.rank}"
        self.session.assembly.registry.notify(hook, place=place, step=step, **arguments)

    def _due(self, step: int, every: int) -> bool:
        """Whether an action with period ``every``, which also follows the last step, is due after ``step``."""
        return step + 1 == self.spec.steps or (every > 0 and (step + 1) % every == 0)

    def _writing_checkpoint(self, step: int) -> AbstractContextManager[None]:
        """Guard the write of a checkpoint. A failure at a run's last one raises under any ``on_full_disk``."""
        last = step + 1 == self.spec.steps
        return nullcontext() if last else self.files.writing(self.run_dir / "checkpoints")

    def _save(self, step: int) -> Path:
        session = self.session
        origin = checkpoint.Origin(
            world=session.layout.plan.world,
            plugins=tuple(tuple(version) for version in session.assembly.versions()),
            tokenizer=session.data.fingerprint,
            sequences=self.feed.order.first(step + 1),
        )
        keep = self.spec.keep_checkpoints
        optimizer = self.engine.optimizer
        path = checkpoint.save(self.run_dir, step + 1, session.model, optimizer, session.layout, origin, keep=keep)
        self.saved = path
        return path

    def _resume(self, which: Which | None) -> int:
        """Load the checkpoint that all ranks resume from and return its step; 0 if they start anew."""
        data = self.session.data
        group = self.host_group
        chosen = checkpoint.choose_together(self.run_dir, which, data, group)
        if chosen is None:
            self._read_weights()
            return 0
        model = self.session.model
        optimizer = self.engine.optimizer
        manifest = checkpoint.load(chosen.folder, model, optimizer, tokenizer=data.fingerprint, group=group)
        begin = manifest.origin.sequences - self.feed.order.first(manifest.step)
        order: Any = evolve(self.feed.order, begin=begin)
        self.feed = evolve(self.feed, order=order)
        if self.session.leads:
            self.notes = [*chosen.passed, *checkpoint.set_aside_after(self.run_dir, manifest.step)]
        return manifest.step

    def _read_weights(self) -> None:
        """Start from the weights of a Hugging Face folder, if the spec names one. Collective."""
        if self.spec.weights is not None:
            stamp("reading weights", slow=True)
            session = self.session
            read_weights(session.model, Path(self.spec.weights), session.assembly, self.host_group)
