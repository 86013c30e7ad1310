"""Report of a run before the first step and after the last: sizes, times, a sample of text."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from moefw.core.data import DataSource
from moefw.core.errors import DataError, printable
from moefw.runtime.parallel.local_shards import num_stored
from moefw.runtime.windows import masks_losses
from moefw.system.files import replaced_file
from moefw.system.stamps import stamp
from moefw.training.clock import StepClock, render
from moefw.training.cpu_speed import against_bf16
from moefw.training.evaluation import zlib_bits_per_byte
from moefw.training.full_disk import RunFiles
from moefw.training.generate import RECOMPUTES, generate, keeps_past
from moefw.training.progress import LEGEND
from moefw.training.records.metrics import METRICS, read_metrics
from moefw.training.session import Session
from moefw.training.what_trains import Parameters
from moefw_kernels.devices import is_gpu, runs_ahead

SAMPLE_PROMPT = "def "
SAMPLE_TOKENS = 160
SAMPLE_TEMPERATURE = 0.7
MOST_ASKED = 1 << 16
"""Most tokens of a question of which a sample is the answer."""


def introduce(session: Session, parameters: Parameters, start: int, changes: Sequence[str], console: Console) -> None:
    """Print the sizes and device of the run, what of the model trains if not all does, the first step, and the
    ``changes`` in the spec of a resumed run.
    """
    held = sum(num_stored(parameter) for parameter in session.model.parameters())
    sizes = " ".join(f"{axis}={size}" for axis, size in session.layout.plan.sizes.items() if size > 1)
    ranks = f"{session.layout.plan.world} ranks ({sizes})" if sizes else "1 rank"
    say(console, f"{ranks} on {session.device.type}, {held / 1e6:.1f} M parameters on rank 0")
    if any(parameters.frozen.values()):
        say(console, parameters.line())
    train = len(session.data.train)
    heldout = len(session.data.heldout)
    ids = session.data.vocab_size
    say(console, f"{train:,} tokens to train on, {heldout:,} held out, a vocabulary of {ids:,}")
    for line in session.data.preview() if session.leads else ():
        say(console, line)
    if masks_losses(session.data.train) and not session.assembly.spec.train.masks_documents:
        say(console, "samples of a window see those before them: train.packing, or document_mask, keeps them apart")
    if is_gpu(session.device) and dist.is_initialized() and dist.get_backend() == "gloo":
        say(console, "ranks share a GPU, through gloo: a layout of one rank a GPU is faster")
    residual: Any = session.model.residual_dtype
    if residual is torch.bfloat16 and not runs_ahead(session.device) and (advice := against_bf16()):
        say(console, advice)
    for note in session.assembly.notes:
        say(console, note)
    if start:
        say(console, f"continuing after step {start}")
        if start >= (steps := session.assembly.spec.train.steps):
            say(console, f"there is nothing to train: train.steps is {steps}")
    for change in changes:
        say(console, f"  {change}")
    say(console, LEGEND)


def conclude(session: Session, run_dir: Path, clock: StepClock, console: Console) -> None:
    """Sample text, and print the results and their folder. Collective."""
    spec = session.assembly.spec
    if not keeps_past(session.model):
        say(console, RECOMPUTES)
    question = _first_question(session.data)
    text = generate(
        session.model,
        session.data,
        question or session.data.encode(SAMPLE_PROMPT),
        tokens=SAMPLE_TOKENS,
        temperature=SAMPLE_TEMPERATURE,
        seed=spec.run.seed,
        window=spec.train.seq_len,
        group=session.layout.host_group(),
    )
    if not session.leads:
        return
    stamp("results")
    zlib_bits = zlib_bits_per_byte(session.data.heldout_bytes)
    files = RunFiles("continue", partial(say, console))
    with files.writing(run_dir / "sample.txt"), replaced_file(run_dir / "sample.txt") as scratch:
        scratch.write_text(text, encoding="utf-8")
    breakdown = clock.breakdown()
    if breakdown:
        console.print(render(breakdown))
    bits = _last_bits(run_dir / METRICS)
    if bits is not None:
        say(console, f"held-out text: {bits:.3f} bits a byte; zlib -9 needs {zlib_bits:.3f}")
    folder = shlex.quote(str(run_dir))
    say(console, f"\n{text}\n\nmetrics, sample and checkpoints are in {run_dir}; what to do with it:")
    asks = "--chat 'How are you?'" if question else f"--prompt {shlex.quote(SAMPLE_PROMPT)}"
    say(console, f"  moefw generate {folder} {asks}")
    say(console, f"  moefw eval {folder}")


def _first_question(data: DataSource) -> list[int] | None:
    """Ids of the first held-out conversation up to what trains of it; None: there are no conversations.

    Also None if nothing is before it in the first ``MOST_ASKED`` tokens.
    """
    count = min(len(data.heldout), MOST_ASKED)
    trained = data.heldout.trained(0, count)
    if trained is None or not trained.any() or trained[0]:
        return None
    return [int(id) for id in data.heldout.read(0, int(trained.argmax()))]


def say(console: Console, text: str) -> None:
    """Print a line without markup or line breaks by the console. A terminal gets no control characters of others."""
    text = printable(text) if console.is_terminal else text
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _last_bits(path: Path) -> float | None:
    """Bits a byte in the last line of the metrics; None if it has none, or if the file cannot be read."""
    bits: float | None = None
    with suppress(DataError):
        for record in read_metrics(path):
            bits = record.get("eval_bits_per_byte")
    return bits
