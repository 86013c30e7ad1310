"""``moefw eval``: the loss of a run's last checkpoint on held-out text."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

import click

from moefw.commands import specs
from moefw.compose.assembly import Assembly
from moefw.core.errors import Problem, SpecError


@click.command(name="eval")
@click.argument("run", type=click.Path())
@click.argument("overrides", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def evaluate(run: str, overrides: tuple[str, ...], as_json: bool) -> int:
    """Evaluate the last checkpoint of RUN (a run's folder) on held-out text, on this process alone.

    Options of data may name other text. Of the text of the run, only what it held out is evaluated.
    """
    assembly = specs.read_run(run, overrides)
    if any(override.startswith("data") for override in overrides):
        require_held_out(specs.read_run(run, ()), assembly)
    from moefw.training.errors import NotFiniteError
    from moefw.training.evaluation import evaluation, zlib_bits_per_byte
    from moefw.training.trained import open_trained

    with open_trained(assembly) as (session, step, notes):
        for note in notes:
            click.echo(f"note: {note}", err=True)
        result = {
            "step": step,
            **evaluation(session),
            "zlib_bits_per_byte": zlib_bits_per_byte(session.data.heldout_bytes),
        }
        if not math.isfinite(result["eval_loss"]):
            raise NotFiniteError(f"the loss of held-out text is {result['eval_loss']}.")
    if as_json:
        click.echo(json.dumps(result))
        return 0
    nats = result["eval_loss"]
    if "eval_bits_per_byte" not in result:
        click.echo(f"step {step}: {nats:.4f} nats a token of held-out text, of the tokens that are to be predicted")
        return 0
    bits = result["eval_bits_per_byte"]
    click.echo(f"step {step}: {bits:.4f} bits a byte of held-out text ({nats:.4f} nats a token)")
    click.echo(f"zlib -9 needs {result['zlib_bits_per_byte']:.4f}")
    return 0


def require_held_out(trained: Assembly, evaluated: Assembly) -> None:
    """Raise SpecError for text of the run of which another share is held out than in training."""
    shares = dict(_shares(trained.resolved()["data"]))
    problems = []
    for path, share in _shares(evaluated.resolved()["data"]):
        before = shares.get(path, share)
        if share != before:
            what = f"the run held out {before} of {path or 'its text'}, not {share}, and trained on the rest."
            problems.append(Problem(what, "Leave heldout out, or name other text.", "data.heldout"))
    if problems:
        raise SpecError(problems)


def _shares(options: Any) -> Iterator[tuple[str, float]]:
    """Yield the text of each source and the share of it that is held out, also inside a blend; "": no file is named."""
    if isinstance(options, Mapping):
        if "path" in options and "heldout" in options:
            yield os.path.realpath(options["path"]) if options["path"] else "", options["heldout"]
        for value in options.values():
            yield from _shares(value)
    elif isinstance(options, list | tuple):
        for item in options:
            yield from _shares(item)
