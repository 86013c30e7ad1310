"""``moefw train``: from a spec file to a trained model."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
from attrs import asdict

from moefw.commands import specs
from moefw.commands.doctor.machine import usable_cores
from moefw.commands.out_of_memory import memory_note
from moefw.commands.report import reported
from moefw.commands.run_plan import planned_beside
from moefw.commands.traces import STEPS, TraceFlags, traced
from moefw.compose.assembly import Assembly
from moefw.compose.local_files import WEIGHTS, weights_problems
from moefw.core.errors import Problem, SpecError
from moefw.system.folders import cache_dir
from moefw.system.python import python
from moefw.training.faults.rank import watched
from moefw.training.faults.requests import StopRequests
from moefw.training.folder import checkpoint_dirs, run_folder
from moefw.training.job import job_to_go_on
from moefw.training.launcher import LAUNCHED, check_room, die_with_launcher, run_local_ranks
from moefw.training.records.ending import RecordedEnd
from moefw.training.resume import Which, candidates, is_choice, read_which
from moefw.training.world import ALONE, place_from_environment, restarted

RESUME = """Continue from a checkpoint of run.dir: the last one, or --resume=last-good (the newest that is whole),
--resume=N (that of step N), --resume=auto (the last one; start anew where there is none)."""


class _Bare(click.Command):
    """A command whose ``--resume`` means ``--resume=last`` and never takes the next word, which is an override."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Replace a bare ``--resume`` by ``--resume=last``, up to a ``--``. Refuse a choice that follows as a word."""
        end = args.index("--") if "--" in args else len(args)
        for option, word in pairwise(args[:end]):
            if option == "--resume" and is_choice(word) and not Path(word).exists():
                raise click.UsageError(f"--resume takes what it is to continue from behind a =: --resume={word}")
        spelled = ["--resume=last" if arg == "--resume" else arg for arg in args[:end]]
        return super().parse_args(ctx, spelled + args[end:])


@click.command(cls=_Bare)
@click.argument("spec", type=click.Path())
@click.argument("overrides", nargs=-1)
@click.option("--resume", metavar="[=WHICH]", help=RESUME)
@click.option("--ledger", is_flag=True, help="Print what memory a rank will hold, and measure it: run.dir/ledger.json.")
@click.option(
    "--trace",
    type=click.Path(path_type=Path),
    metavar="FILE.json",
    help="Trace what every rank computes, sends and waits for in two steps; FILE.png shows it.",
)
@click.option("--trace-steps", metavar="A:B", help=STEPS)
@click.option("--trace-operators", is_flag=True, help="Also PyTorch's operators, by its profiler: FILE.operators/.")
@click.option("--trace-memory", is_flag=True, help="Also a snapshot of each GPU's memory: FILE.memory/.")
def train(spec: str, overrides: tuple[str, ...], resume: str | None, ledger: bool, **traces: Any) -> int:
    """Train as SPEC says, with key=value overrides (train.steps=20).

    Starts the local ranks that the layout needs, or joins a torchrun or Slurm world when it finds one.
    """
    which: Which | None = None if resume is None else read_which(resume)
    place = place_from_environment()
    assembly = specs.read(spec, overrides, place.world if place else None)
    job = job_to_go_on(assembly)
    if which is None and (restarted() or job):
        which = "auto"
    tracing = TraceFlags(**traces).options(assembly)
    run = assembly.spec.run
    note = partial(memory_note, assembly)
    leads = LAUNCHED not in os.environ and (place is None or place.rank == 0)
    goes_on = which is not None and (not leads or bool(candidates(Path(run.dir), which)))
    with _requests(assembly, resume=goes_on) as requests, ExitStack() as stack:
        if place is None and assembly.layout.world > 1:
            _check_start(assembly, spec)
            with watched(run, ALONE, requests, memory_note=note):
                assembly.parts.data.prepare(cache_dir())
        if not goes_on:
            _require_input(assembly)
        if leads:
            stack.enter_context(run_folder(assembly, resume=goes_on, again=which == "auto", tell=click.echo))
            if resume is None and job:
                click.echo(f"{run.dir} goes on, as the same job began it: {job}")
            stack.enter_context(traced(tracing, click.echo))
            stack.enter_context(reported(Path(run.dir), requests, failures=place is None))
            end = stack.enter_context(RecordedEnd(Path(run.dir)))
            if ledger:
                _open_ledger(assembly)
            else:
                stack.enter_context(planned_beside(assembly))
        if place is None and assembly.layout.world > 1:
            command = python("-m", "moefw", *sys.argv[1:])
            end.code = run_local_ranks(command, assembly.layout.world, run, requests, memory_note=note)
            return end.code
        die_with_launcher()
        with watched(run, place or ALONE, requests, memory_note=note):
            from moefw.training import trainer

            trainer.train(assembly, place or ALONE, resume=which, ledger=ledger, traces=tracing, requests=requests)
    return 0


def _requests(assembly: Assembly, *, resume: bool) -> StopRequests:
    """Signal handlers of this process. Before its first save, only a resumed run has a checkpoint."""
    run_dir = Path(assembly.spec.run.dir)
    return StopRequests(
        resumable=lambda: resume and bool(checkpoint_dirs(run_dir)),
        launched=LAUNCHED in os.environ,
        torchrun="TORCHELASTIC_RUN_ID" in os.environ,
    )


def _check_start(assembly: Assembly, spec: str) -> None:
    """Refuse ranks that this machine cannot start, or that could not read the spec."""
    world = assembly.layout.world
    check_room(world, cores=usable_cores())
    if world > 1 and not Path(spec).is_file():
        raise SpecError(f"{spec} is no file, and each of several ranks reads it.", "Write the spec to a file.")


def _require_input(assembly: Assembly) -> None:
    """Refuse weights that are not there, and input from run.dir, as an earlier run there is moved aside."""
    run_dir = Path(assembly.spec.run.dir).resolve()
    weights = assembly.spec.train.weights
    problems = [] if weights is None else [*weights_problems(Path(weights))]
    read = [(f"data.{option}", value) for option, value in specs.words(assembly.spec.data.options)]
    for option, value in [*read, *([] if weights is None else [(WEIGHTS, weights)])]:
        if Path(value).exists() and Path(value).resolve().is_relative_to(run_dir):
            what = f"{value} lies in run.dir, which gives way to the new run."
            problems.append(Problem(what, "Copy it to another place, or use another run.dir.", option))
    if problems:
        raise SpecError(problems)


def _open_ledger(assembly: Assembly) -> None:
    """Print and write the predicted memory; for ranks on a CPU, also the measured memory of a rank's step."""
    from moefw.commands.plan import PLANS
    from moefw.commands.plan_tables import show
    from moefw.planner import ledger
    from moefw.planner.sheets import unit_for
    from moefw.training.ledger_file import write

    predicted = ledger(assembly, cache=cache_dir() / PLANS)
    show(predicted)
    write(assembly, predicted=predicted.to_data())
    if assembly.site.machine.device == "cpu":
        from moefw.training.measured import measure

        measured = measure(assembly)
        plain = {"saved": measured.saved_bytes, "regions": measured.by_region(), "peak_place": str(measured.peak_place)}
        write(assembly, measured={**asdict(measured), **plain})
        unit, name = unit_for(measured.peak)
        saved = measured.saved_bytes / unit
        peak = measured.peak / unit
        click.echo(f"measured without values: saved {saved:.3f}, peak {peak:.3f} {name} in {measured.peak_place}")
