"""Progress display of a run: one live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, NamedTuple, Self, final

from attrs import frozen
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

LINE_EVERY_S = 10.0
LEGEND = """loss: of the training text, in nats a token; eval: of held-out text, in bits a byte (of chats: nats a token)
balance: tokens of the busiest expert over the mean, 1.00 is even; TFLOPS: what the model asks of a rank"""
"""What the words of a line mean."""
_SMOOTHING = 0.95
"""Decay of the smoothed loss, which averages over about 20 steps."""
_RATE_STEPS = 100
"""Number of last steps from which the time left is estimated."""
_MIN_BAR = 8
_MAX_BAR = 40


@frozen
class Evaluation:
    """Loss of held-out text and its unit: of text with prompts, whose bytes are not counted, nats a token."""

    value: float
    unit: str

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Evaluation | None:
        """Evaluation in the record of a step; None if the step has none."""
        if "eval_bits_per_byte" in record:
            return cls(record["eval_bits_per_byte"], "bits/byte")
        return cls(record["eval_loss"], "nats/token") if "eval_loss" in record else None


@frozen(kw_only=True)
class _Seen:
    """One step, replaced as a whole: the thread that redraws the line reads it during the run."""

    step: int
    loss: float
    smooth_loss: float
    tokens_per_s: float
    load_max_over_mean: float
    lr: float
    model_tflops: str
    """Model TFLOPS of a rank, and their share of the peak; empty: unknown."""


class _Part(NamedTuple):
    """Part of the line. A form has ``{}`` for the value. The part with the lowest ``rank`` is dropped last."""

    rank: int
    value: str
    form: str
    short_value: str = ""
    short_form: str = ""

    def text(self, *, short: bool) -> Text:
        value, form = (self.short_value or self.value, self.short_form or self.form) if short else self[1:3]
        before, after = form.split("{}")
        return Text.assemble((before, "dim"), (value, "bold"), (after, "dim"))


@final
class Progress:
    """Shows the progress of a run; a context manager, used on rank 0 only.

    ``start_step`` is the number of steps done before, ``total_steps`` the step at which the run ends. On a terminal
    one line is redrawn: the loss smoothed over about 20 steps, tokens per second, balance, the last evaluation
    (``LEGEND`` says what they are), elapsed time, time left. Parts that do not fit are left out. Elsewhere the first
    and last steps print a line each, and those between at most one every ``LINE_EVERY_S`` seconds; there the loss is
    that of the step, as in ``metrics.jsonl``.
    """

    def __init__(
        self,
        *,
        total_steps: int,
        start_step: int,
        console: Console | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total_steps = total_steps
        self._start_step = start_step
        self._console = console or Console()
        self._now = now
        self._start_s = now()
        self._marks: deque[tuple[float, int]] = deque(maxlen=_RATE_STEPS)
        self._seen: _Seen | None = None
        self._evaluation: Evaluation | None = None
        self._loss_sum = self._loss_weight = 0.0
        self._line_s = -math.inf
        self._line_step: int | None = None
        live = self._console.is_terminal and not self._console.is_dumb_terminal
        self._live = Live(self, console=self._console, refresh_per_second=4) if live else None

    def __enter__(self) -> Self:
        self._start_s = self._now()
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()
        elif self._seen and self._seen.step != self._line_step:
            self._print_line(self._seen)

    def update(
        self,
        step: int,
        *,
        loss: float,
        tokens_per_s: float,
        load_max_over_mean: float,
        lr: float,
        model_tflops_per_gpu: float | None = None,
        mfu: float | None = None,
        evaluation: Evaluation | None = None,
    ) -> None:
        """Record a step that is done; ``step`` counts from 1, ``loss`` is in nats per token.

        An ``evaluation`` is shown until the next one. A non-finite loss is shown and does not enter the smoothed loss.
        """
        self._marks.append((self._now(), step))
        if evaluation is not None:
            self._evaluation = evaluation
        if math.isfinite(loss):
            self._loss_sum = _SMOOTHING * self._loss_sum + loss
            self._loss_weight = _SMOOTHING * self._loss_weight + 1.0
        self._seen = seen = _Seen(
            step=step,
            loss=loss,
            smooth_loss=self._loss_sum / self._loss_weight if math.isfinite(loss) else loss,
            tokens_per_s=tokens_per_s,
            load_max_over_mean=load_max_over_mean,
            lr=lr,
            model_tflops=_model_tflops(model_tflops_per_gpu, mfu),
        )
        due = self._line_step is None or step >= self._total_steps or self._now() - self._line_s >= LINE_EVERY_S
        if not self._live and due:
            self._print_line(seen)

    def note(self, text: str) -> None:
        """Print a separate line, above the bar if there is one."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _print_line(self, seen: _Seen) -> None:
        self._line_s = self._now()
        self._line_step = seen.step
        parts = [
            f"step {seen.step}/{self._total_steps}",
            f"loss {seen.loss:.4f} nats/token",
            f"{seen.tokens_per_s:,.0f} tokens/s",
            *([seen.model_tflops] if seen.model_tflops else []),
            f"balance {seen.load_max_over_mean:.2f}",
            f"lr {seen.lr:.1e}",
        ]
        if self._evaluation is not None:
            parts.append(f"eval {self._evaluation.value:.3f} {self._evaluation.unit}")
        left_s = self._left_s()
        if left_s is not None:
            parts.append(f"left {_clock(left_s)}")
        self.note("  ".join(parts))

    def _left_s(self) -> float | None:
        """Seconds left at the pace of the last steps. None before the second step, as the first compiles."""
        if len(self._marks) < 2:
            return None
        first_s, first = self._marks[0]
        last_s, last = self._marks[-1]
        return (last_s - first_s) / max(last - first, 1) * max(self._total_steps - last, 0)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw the line: in full if that fits, else in short, and then without its least important parts."""
        parts = self._parts()
        line = _join(parts, short=False)
        if line.cell_len + _MIN_BAR + 1 > options.max_width:
            line = _join(parts, short=True)
        while len(parts) > 1 and line.cell_len + (_MIN_BAR + 1 if len(parts) > 2 else 0) > options.max_width:
            parts.remove(max(parts))
            line = _join(parts, short=True)
        bar_width = min(options.max_width - line.cell_len - 1, _MAX_BAR)
        done = self._seen.step if self._seen else self._start_step
        grid = Table.grid(padding=(0, 1, 0, 0))
        cells: list[ProgressBar | Text] = [line]
        if bar_width >= _MIN_BAR:
            grid.add_column(width=bar_width)
            bar = ProgressBar(total=max(self._total_steps, 1), completed=done, width=bar_width, complete_style="cyan")
            cells.insert(0, bar)
        grid.add_column(no_wrap=True, overflow="crop")
        grid.add_row(*cells)
        yield grid

    def _parts(self) -> list[_Part]:
        """Parts from left to right."""
        seen = self._seen
        elapsed = _clock(self._now() - self._start_s)
        if seen is None:
            return [_Part(0, self._count(self._start_step), "{}"), _Part(1, elapsed, "first step {}")]
        parts = [
            _Part(0, self._count(seen.step), "{}"),
            _Part(1, f"{seen.smooth_loss:.3f}", "loss {} nats/token", short_form="loss {}"),
            _Part(5, f"{seen.tokens_per_s:,.0f}", "{} tokens/s", short_form="{} tok/s"),
            _Part(3, f"{seen.load_max_over_mean:.2f}", "balance {}"),
        ]
        if seen.model_tflops:
            parts.insert(3, _Part(7, seen.model_tflops, "{}"))
        if self._evaluation is not None:
            value = self._evaluation.value
            parts.append(_Part(4, f"{value:.3f}", f"eval {{}} {self._evaluation.unit}", f"{value:.2f}", "eval {}"))
        parts.append(_Part(6, elapsed, "{} elapsed"))
        left_s = self._left_s()
        if left_s is not None:
            parts.append(_Part(2, _clock(left_s), "{} left"))
        return parts

    def _count(self, step: int) -> str:
        """``step/total``, always of one width, so that the bar does not jump."""
        return f"{step:>{len(str(self._total_steps))}}/{self._total_steps}"


def _model_tflops(tflops: float | None, mfu: float | None) -> str:
    """``912 TFLOPS (36.5 % MFU)`` of a GPU; empty if unknown."""
    if tflops is None:
        return ""
    told = f"{tflops:.3g} TFLOPS"
    return told if mfu is None else f"{told} ({mfu:.1%} MFU)"


def _join(parts: list[_Part], *, short: bool) -> Text:
    return Text("  ").join(part.text(short=short) for part in parts)


def _clock(seconds: float) -> str:
    """``m:ss``, or ``h:mm:ss`` from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
