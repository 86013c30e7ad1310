"""What came of a run, in ten lines."""

from __future__ import annotations

import time
from collections.abc import Sequence

from moefw.report.blocks import Facts, Section
from moefw.report.charts import Charts
from moefw.report.reading import Run
from moefw.report.words import count, duration, number, several, share, size

STALE_S = 300.0
"""Seconds without a line after which a run without an end is probably not going on."""
OF_PROCESS = "of the process"
"""What the peak of a rank on a CPU is measured of: Python, PyTorch and the text are in it, too."""
TROUBLE = {
    "skipped_step": "step skipped",
    "rerun_step": "step run again",
    "loss_spike": "spike of the loss",
    "full_disk": "full disk",
}


def section(runs: Sequence[Run], charts: Charts) -> Section | None:
    """What came of a run; several are compared instead."""
    if len(runs) > 1:
        return None
    (run,) = runs
    lines = {
        "Outcome": state(run),
        "Held-out text": held_out(run),
        "Training loss": training_loss(run),
        "Speed": speed(run),
        "Time of a step": slowest_sections(run),
        "Experts": balance(run),
        "Gradient norm": gradient_norm(run),
        "Memory": memory(run),
        "Trouble": trouble(run),
        "Checkpoint": checkpoint(run),
    }
    return Section("outcome", "What came of it", [Facts([(term, said) for term, said in lines.items() if said])])


def state(run: Run) -> str:
    """Whether the run is done, and how much of it."""
    last = run.buckets.last_step
    asked = run.setting("train", "steps")
    steps = f"{last:,} of {count(asked, 'step')}" if isinstance(asked, int) and asked != last else count(last, "step")
    per_step = run.start.get("tokens_per_step") or run.setting("train", "tokens_per_step")
    tokens = f", {last * per_step:,} tokens" if isinstance(per_step, int) else ""
    took = "" if run.first_time is None or run.last_time is None else f", in {duration(run.last_time - run.first_time)}"
    done = f"{steps}{tokens}{took}"
    end = run.end
    if end is not None:
        outcome = str(end.get("outcome") or "ended").capitalize()
        reason = f" Reason: {end['reason']}" if end.get("reason") else ""
        return f"{outcome}: {done}.{reason}"
    if not run.events:
        return f"{done}. How it ended was not recorded."
    ago_s = None if run.last_time is None else time.time() - run.last_time
    if ago_s is not None and ago_s < STALE_S:
        return f"Still going: {done}. The last step ended {duration(max(ago_s, 0.0))} before this page was made."
    return f"Without an end: {done}. The run was killed, or stands still."


def held_out(run: Run) -> str:
    """The last evaluation beside the first and zlib's."""
    if not run.evaluations:
        return ""
    first, last = run.evaluations[0], run.evaluations[-1]
    if last.bits_per_byte is None:
        return f"{number(last.loss)} nats a token after step {last.step:,}."
    zlib = next(
        (event["zlib_bits_per_byte"] for event in run.of("evaluation") if event.get("zlib_bits_per_byte")), None
    )
    text = f"{number(last.bits_per_byte)} bits a byte after step {last.step:,}"
    if first is not last and first.bits_per_byte is not None:
        text += f", from {number(first.bits_per_byte)} after step {first.step:,}"
    return f"{text}. zlib -9 needs {number(zlib)}." if zlib is not None else f"{text}."


def training_loss(run: Run) -> str:
    """The last loss, the first and the least."""
    loss = run.buckets.get("loss")
    if loss is None:
        return "No loss was recorded." if not run.buckets.curves.get("loss") else "No step had a finite loss."
    least, step = loss.lowest
    text = (
        f"{number(loss.last)} nats a token in step {loss.last_step:,}; the least is {number(least)} in step {step:,}."
    )
    if loss.num_missing:
        named = several([f"{step:,}" for step in loss.missing])
        more = "" if loss.num_missing <= len(loss.missing) else " and others"
        text += f" It was not finite in {count(loss.num_missing, 'step')}: {named}{more}."
    return text


def speed(run: Run) -> str:
    """Mean tokens a second."""
    rate = run.buckets.get("tokens_per_s")
    if rate is None:
        return ""
    return (
        f"{number(rate.mean)} tokens a second in the mean of all steps, "
        f"from {number(rate.lowest[0])} to {number(rate.highest[0])}."
    )


def slowest_sections(run: Run) -> str:
    """The mean time of a step and the sections that take most of it."""
    means = section_means(run)
    if not means:
        return ""
    total = sum(means.values())
    longest = sorted(means, key=lambda name: -means[name])[:3]
    parts = [f"{name} {share(means[name] / total)}" for name in longest]
    return f"{duration(total)} in the mean: {several(parts)}."


def section_means(run: Run) -> dict[str, float]:
    """Mean seconds of a step by section, over all steps; a step without a section counts as 0 there."""
    curves = {name.removeprefix("seconds/"): run.buckets.curves[name] for name in run.buckets.names("seconds/")}
    most = max((curve.num_values for curve in curves.values()), default=0)
    return {name: curve.mean * curve.num_values / most for name, curve in curves.items()}


def balance(run: Run) -> str:
    """The busiest and the idlest expert of the last window, and the dead ones."""
    if not run.windows:
        return ""
    window = run.windows[-1]
    busy = window.load_LE.argmax()
    layer, expert = divmod(int(busy), window.load_LE.shape[1])
    dead = int((window.load_LE == 0).sum())
    steps = f"steps {window.first:,} to {window.last:,}" if window.last > window.first else f"step {window.last:,}"
    without = "none was without tokens" if not dead else f"{dead:,} of {window.load_LE.size:,} were without tokens"
    return (
        f"In {steps}, the busiest expert had {number(float(window.load_LE.max()), 3)} of a fair share "
        f"(layer {window.layers[layer]}, expert {expert}); {without}."
    )


def gradient_norm(run: Run) -> str:
    """The last norm and the largest."""
    norm = run.buckets.get("grad_norm")
    if norm is None:
        return ""
    largest, step = norm.highest
    return f"{number(norm.last)} in step {norm.last_step:,}; the largest is {number(largest)} in step {step:,}."


def memory(run: Run) -> str:
    """The planned and the measured peak."""
    planned = planned_peak(run)
    measured = measured_peak(run)
    told = [f"{size(planned)} planned for a rank"] if planned else []
    told += [f"{size(measured[0])} measured ({measured[1]})"] if measured else []
    return f"{'; '.join(told)}." if told else ""


def planned_peak(run: Run) -> int | None:
    """Bytes of the planned peak; None if there is no plan."""
    peak = (run.ledger.get("predicted") or {}).get("peak_bytes")
    return peak if isinstance(peak, int) else None


def measured_peak(run: Run) -> tuple[int, str] | None:
    """Bytes of the measured peak and what was measured; None if nothing was."""
    at_end = (run.end or {}).get("memory") or {}
    if isinstance(at_end.get("peak_bytes"), int):
        return at_end["peak_bytes"], f"of the {at_end.get('of', 'rank')}"
    measured = (run.ledger.get("measured") or {}).get("peak")
    return (measured, "by --ledger") if isinstance(measured, int) else None


def trouble(run: Run) -> str:
    """Resumes, and events that a healthy run has not; empty for a run without events."""
    if not run.events:
        return ""
    told = [count(len(events), text) for kind, text in TROUBLE.items() if (events := run.of(kind))]
    resumes = run.of("resume")
    if resumes:
        lost = sum(event["lost_steps"] for event in resumes if isinstance(event.get("lost_steps"), int))
        told.append(f"{count(len(resumes), 'resume')}, which lost {count(lost, 'step')}")
    return f"{several(told)}." if told else "None was recorded."


def checkpoint(run: Run) -> str:
    """The newest checkpoint."""
    saved = run.of("checkpoint")
    if not saved:
        return ""
    return (
        f"{saved[-1].get('path', 'one')}, after step {saved[-1]['step']:,}; {count(len(saved), 'checkpoint')} in all."
    )
