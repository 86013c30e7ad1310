"""The command line. Heavy modules are imported only by the commands that need them."""

from __future__ import annotations

import importlib
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from typing import Any, NoReturn

import click

import moefw
from moefw.commands.process import INTERRUPTED, end_at_once, local_rank, rank, say_interrupted
from moefw.compose.plugin_commands import PluginCommand, plugin_commands
from moefw.core.errors import MoefwError, SpecError, os_reason
from moefw.training.errors import StoppedError

PATIENCE_S = 5.0
"""Seconds that a rank waits before it prints and exits. When one rank exits, torchrun stops all others, even one that
still has to report the cause."""

COMMANDS = {
    "train": "Train as SPEC says; starts local ranks by itself, or joins torchrun or Slurm.",
    "eval": "Loss of a run's last checkpoint on held-out text.",
    "generate": "Text from a run's last checkpoint.",
    "report": "One HTML page about a run, or several beside each other.",
    "inspect": "What the checkpoints of a run hold; with --verify, whether they are whole.",
    "convert": "A Hugging Face folder as a run, and a run's model as such a folder.",
    "check": "Every problem of SPEC at once, without a GPU or a process group.",
    "plan": "What a rank will hold in memory, by category and by region, from SPEC alone.",
    "tune": "The fastest layout, schedule and policies for SPEC on a cluster, and why the rest loses.",
    "plugins": "Every plugin by kind: where from, usable here; of one, why not, and its options.",
    "matrix": "What goes with what, and why the rest does not.",
    "bench": "This machine as a cluster of figures; times of kernels on this GPU, which later runs use.",
    "new": "Write a package with a plugin of your own, which passes its suite as it is.",
    "schema": "JSON Schema of a spec, for editors.",
    "doctor": "What this machine can do, and how to install what is missing.",
}

FUNCTIONS = {"eval": "evaluate", "inspect": "inspect_run"}
"""Functions of those commands whose names Python has for something else."""


class _Lazy(click.Group):
    """Command group that imports a command when it is called. The summaries of ours are in ``COMMANDS``."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Commands in the order in which a user needs them, and then those of plugins."""
        return list(COMMANDS | plugin_commands())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Command, imported; None if there is none. Ours are found without a look at those of plugins."""
        if cmd_name not in COMMANDS:
            of_plugin = plugin_commands().get(cmd_name)
            return of_plugin.load(COMMANDS) if of_plugin else None
        module = importlib.import_module(f"moefw.commands.{cmd_name}")
        command: click.Command = getattr(module, FUNCTIONS.get(cmd_name, cmd_name))
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Print the summaries without importing the commands."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))
        others = plugin_commands()
        if others:
            with formatter.section("Commands of plugins"):
                formatter.write_dl([(name, _summary(command)) for name, command in others.items()])


def _summary(command: PluginCommand) -> str:
    """The origin of a plugin's command, or why it cannot run."""
    problem = command.problem(COMMANDS)
    return f"Cannot run: {problem}" if problem else f"Of {command.origins}."


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(moefw.__version__, prog_name="moefw")
@click.pass_context
def cli(context: click.Context) -> None:
    """Train Mixture-of-Experts transformers whose every system technique is a plugin.

    Exit codes: 0 done, 1 the run failed, 2 the user's input is wrong, 75 a signal stopped the run: --resume continues.
    """
    context.with_resource(_raised_interrupts())
    try:
        os.getcwd()
    except OSError as error:  # libraries that a command imports would fail, or abort
        what = f"the working folder cannot be used: {os_reason(error)}."
        raise SpecError(what, "Change to a folder that exists.") from error


@contextmanager
def _raised_interrupts() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt inside, so that a command undoes what it has begun."""
    if signal.getsignal(signal.SIGINT) is not end_at_once:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, end_at_once)


def main(arguments: list[str] | None = None) -> None:
    """Run a command and exit with its code. Errors of moefw print as messages, not as tracebacks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        result: Any = cli.main(arguments, standalone_mode=False)
        code = result if isinstance(result, int) else 0
    except MoefwError as error:
        _say(error)
        code = error.exit_code
    except click.exceptions.Abort:
        say_interrupted()
        code = INTERRUPTED
    except click.ClickException as error:
        override = _meant_override(error, sys.argv[1:] if arguments is None else arguments)
        if override:
            click.echo(f"error: options of a spec are written without dashes. Write {override}", err=True)
        else:
            error.show()
        code = error.exit_code
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 1
    _leave(code)


def _meant_override(error: click.ClickException, arguments: list[str]) -> str:
    """Override ``a.b=x`` that was meant by ``--a.b x`` or ``--a.b=x``; empty if it was none."""
    if not (isinstance(error, click.NoSuchOption) and error.ctx and "." in error.option_name):
        return ""
    if all(parameter.name != "overrides" for parameter in error.ctx.command.params):
        return ""
    option = error.option_name
    key = option.removeprefix("--")
    for argument, following in zip(arguments, [*arguments[1:], "value"]):
        if argument == option:
            return shlex.quote(f"{key}={following}")
        if argument.startswith(f"{option}="):
            return shlex.quote(argument.removeprefix("--"))
    return f"{key}=value"


def _say(error: MoefwError) -> None:
    """Print an error. Ranks that have nothing else to say than another one first wait for it to print.

    It is rank 0 for an error of every rank, and the first rank of a machine unless a run failed. Its end ends those
    that wait. A rank that is not ended prints, too: the other one may be stuck.
    """
    speaks = rank() == "0" or (local_rank() == "0" and not error.on_every_rank)
    if not speaks and (error.on_every_rank or error.exit_code != 1):
        time.sleep(PATIENCE_S)
    kind = "" if isinstance(error, StoppedError) else "error: "
    for problem in error.problems:
        named = rank() == "0" or str(problem).startswith(f"rank {rank()} ")
        click.echo(f"{kind}{'' if named else f'rank {rank()}: '}{problem}", err=True)


def _leave(code: int) -> NoReturn:
    """Exit with ``code``. A rank does not finalize the interpreter.

    A gloo thread may still hold the last tensor. Freeing it in finalization aborts the process (pytorch#179291).
    """
    if {"RANK", "SLURM_PROCID"} & os.environ.keys():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
