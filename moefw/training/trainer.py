"""The training run: steps, evaluations, checkpoints, and what the user sees of them."""

from __future__ import annotations

import json
import math
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from rich.console import Console
from ruamel.yaml import YAML

from moefw.core.assembly import Assembly
from moefw.core.stages import Batch
from moefw.training import checkpoint
from moefw.training.clock import StepClock, render
from moefw.training.data.order import BatchOrder, heldout_windows
from moefw.training.engine import Engine, StepResult, evaluate
from moefw.training.folder import last_checkpoint
from moefw.training.generate import generate
from moefw.training.metrics import MetricsLog, read_metrics
from moefw.training.plots import plot_expert_load, plot_loss
from moefw.training.progress import Progress
from moefw.training.session import Session, open_session
from moefw.training.world import Place

BALANCE_WINDOW = 50
"""Steps over which the expert load of the closing heat map is averaged."""
SAMPLE_TOKENS = 160
SAMPLE_PROMPT = "def "


def train(assembly: Assembly, place: Place, *, resume: bool) -> None:
    """Train as the assembly says, from the start or from the last checkpoint of the run's folder. Collective."""
    with open_session(assembly, place) as session:
        Trainer(session, resume=resume).run()


class Trainer:
    """One run on this rank."""

    def __init__(self, session: Session, *, resume: bool) -> None:
        assembly = session.assembly
        self.session, self.train_spec = session, assembly.spec.train
        self.run_dir = Path(assembly.spec.run.dir)
        optimizer = assembly.parts.optimizer.build(_by_name(session), self.train_spec.lr)
        self.engine = Engine(session.model, optimizer, session.layout, clip_norm=self.train_spec.clip_norm)
        self.start = self._resume() if resume else 0
        self.order = BatchOrder(
            num_tokens=len(session.data.train),
            seq_len=self.train_spec.seq_len,
            sequences_per_step=self.train_spec.tokens_per_step // self.train_spec.seq_len,
            seed=assembly.spec.run.seed,
        )
        self.clock = StepClock()
        self.loads: list[list[list[float]]] = []
        self.console = Console(quiet=not session.leads)

    def run(self) -> None:
        """Train to the last step."""
        spec, session = self.train_spec, self.session
        log = None
        if session.leads:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            _write_resolved(session.assembly, self.run_dir)
            log = MetricsLog(self.run_dir, keep_until=self.start if self.start else None)
        self._introduce()
        progress = Progress(total_steps=spec.steps, start_step=self.start, console=self.console)
        with progress:
            for step in range(self.start, spec.steps):
                began = time.perf_counter()
                record = self._step(step)
                record["tokens_per_s"] = spec.tokens_per_step / (time.perf_counter() - began)
                record |= self._evaluate_if_due(step)
                if log is not None:
                    log.write(record)
                shown = {key: record[key] for key in ("loss", "tokens_per_s", "load_max_over_mean", "lr")}
                progress.update(step + 1, **shown, eval_bits_per_byte=record.get("eval_bits_per_byte"))
                self._checkpoint_if_due(step, progress)
        if log is not None:
            log.close()
        self._conclude()

    def _step(self, step: int) -> dict[str, Any]:
        assembly = self.session.assembly
        registry = assembly.registry
        registry.notify("moefw_before_step", step=step)
        with self.clock("data"):
            batches = list(self._micro_batches(step))
        lr = self.train_spec.lr * assembly.parts.schedule.factor(step, self.train_spec.steps)
        result = self.engine.step(batches, lr, self.clock)
        self.clock.step_done()
        self.loads = [*self.loads, result.load_LE][-BALANCE_WINDOW:]
        record = _record(step, lr, result)
        registry.notify("moefw_after_step", step=step, metrics=record)
        return record

    def _micro_batches(self, step: int) -> Iterator[Batch]:
        """Yield this rank's share of the step's sequences, ``micro_batch`` at a time."""
        spec, layout = self.train_spec, self.session.layout
        starts = self.order.starts(step)
        each = len(starts) // layout.size("dp")
        mine = starts[layout.index("dp") * each :][:each]
        for first in range(0, each, spec.micro_batch):
            yield self.session.batch(self._windows("train", mine[first : first + spec.micro_batch]))

    def _windows(self, split: str, starts: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
        stream = getattr(self.session.data, split)
        return np.stack([stream.read(int(start), self.train_spec.seq_len + 1) for start in starts])

    def _evaluate_if_due(self, step: int) -> dict[str, float]:
        every = self.train_spec.eval_every
        last = step + 1 == self.train_spec.steps
        if not (last or (every and (step + 1) % every == 0)):
            return {}
        return evaluation(self.session)

    def _checkpoint_if_due(self, step: int, progress: Progress) -> None:
        every = self.train_spec.checkpoint_every
        if step + 1 == self.train_spec.steps or (every and (step + 1) % every == 0):
            identity = {"world": self.session.layout.plan.world, "plugins": self.session.assembly.registry.versions()}
            folder = checkpoint.save(
                self.run_dir,
                step + 1,
                self.session.model,
                self.engine.optimizer,
                self.session.layout,
                identity,
                keep=self.train_spec.keep_checkpoints,
            )
            progress.note(f"saved {folder}")

    def _resume(self) -> int:
        manifest = checkpoint.load(last_checkpoint(self.run_dir), self.session.model, self.engine.optimizer)
        step: int = manifest["step"]
        return step

    def _introduce(self) -> None:
        session = self.session
        held = sum(parameter.numel() for parameter in session.model.parameters())
        sizes = " ".join(f"{axis}={size}" for axis, size in session.layout.plan.sizes.items() if size > 1)
        ranks = f"{session.layout.plan.world} ranks ({sizes})" if sizes else "1 rank"
        tokens = f"{len(session.data.train):,} tokens to train on, {len(session.data.heldout):,} held out"
        self._say(f"{ranks} on {session.device.type}, {held / 1e6:.1f} M parameters on rank 0\n{tokens}")
        if session.device.type == "cuda" and dist.is_initialized() and dist.get_backend() == "gloo":
            self._say("ranks share a GPU, through gloo: a layout of one rank a GPU is faster")
        if self.start:
            self._say(f"continuing after step {self.start}")

    def _say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _conclude(self) -> None:
        """Sample text, draw the plots, and say where everything is."""
        session, spec = self.session, self.session.assembly.spec
        text = generate(
            session.model,
            session.data,
            SAMPLE_PROMPT,
            tokens=SAMPLE_TOKENS,
            temperature=0.7,
            seed=spec.run.seed,
            window=spec.train.seq_len,
        )
        if not session.leads:
            return
        zlib_bits = zlib_bits_per_byte(session.data.heldout_bytes)
        records = read_metrics(self.run_dir / "metrics.jsonl")
        plots = self.run_dir / "plots"
        plots.mkdir(exist_ok=True)
        plot_loss(records, plots / "loss.png", zlib_bits=zlib_bits)
        if self.loads and self.loads[0]:
            layers = list(session.assembly.parts.model.moe_layers())
            load_LE = np.mean(np.array(self.loads), axis=0).tolist()
            title = f"Expert load over the last {len(self.loads)} steps"
            plot_expert_load(load_LE, layers, plots / "expert_load.png", title=title)
        (self.run_dir / "sample.txt").write_text(text)
        self._print_summary(records, zlib_bits, text)

    def _print_summary(self, records: list[dict[str, Any]], zlib_bits: float, text: str) -> None:
        breakdown = self.clock.breakdown()
        if breakdown:
            self.console.print(render(breakdown))
        bits = records[-1].get("eval_bits_per_byte")
        if bits is not None:
            self._say(f"held-out text: {bits:.3f} bits a byte; zlib -9 needs {zlib_bits:.3f}")
        self._say(f"\n{text}\n\nmetrics, plots, sample and checkpoints are in {self.run_dir}")


def evaluation(session: Session) -> dict[str, float]:
    """Return ``eval_loss`` (nats a token) and ``eval_bits_per_byte`` over held-out text. Collective."""
    spec, layout, data = session.assembly.spec.train, session.layout, session.data
    starts = [
        int(start) for start in heldout_windows(len(data.heldout), seq_len=spec.seq_len, max_tokens=spec.eval_tokens)
    ]
    size, ranks = spec.micro_batch, layout.size("dp")
    rounds = math.ceil(len(starts) / (size * ranks))
    batches = []
    for index in range(rounds):
        first = (index * ranks + layout.index("dp")) * size
        mine = starts[first : first + size]
        padded = mine + [0] * (size - len(mine))
        windows = np.stack([data.heldout.read(start, spec.seq_len + 1) for start in padded])
        batches.append(session.batch(windows, valid=len(mine)))
    loss = evaluate(session.model, batches, layout)
    tokens_per_byte = len(data.heldout) / max(1, len(data.heldout_bytes))
    return {"eval_loss": loss, "eval_bits_per_byte": loss / math.log(2) * tokens_per_byte}


def zlib_bits_per_byte(text: bytes) -> float:
    """Return what ``zlib -9`` needs for the text, in bits a byte."""
    return 8 * len(zlib.compress(text, 9)) / max(1, len(text))


def _by_name(session: Session) -> dict[str, Any]:
    return dict(session.model.named_parameters())


def _record(step: int, lr: float, result: StepResult) -> dict[str, Any]:
    return {
        "step": step + 1,
        "loss": result.loss,
        **result.aux_losses,
        "grad_norm": result.grad_norm,
        "lr": lr,
        "load_max_over_mean": result.load_max_over_mean,
        "expert_load": [[round(share, 4) for share in load] for load in result.load_LE],
    }


def _write_resolved(assembly: Assembly, run_dir: Path) -> None:
    scratch = run_dir / "spec.yaml.tmp"
    with scratch.open("w") as file:
        YAML().dump(json.loads(json.dumps(assembly.resolved())), file)
    scratch.replace(run_dir / "spec.yaml")
