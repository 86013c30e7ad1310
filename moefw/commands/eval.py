"""``moefw eval``: the loss of a run's last checkpoint on held-out text."""

from __future__ import annotations

import json
import math

import click

from moefw.commands import specs


@click.command(name="eval")
@click.argument("run", type=click.Path())
@click.argument("overrides", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def evaluate(run: str, overrides: tuple[str, ...], as_json: bool) -> int:
    """Evaluate the last checkpoint of RUN (a run's folder) on held-out text, on this process alone."""
    assembly = specs.read_run(run, overrides)
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
