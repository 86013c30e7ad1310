"""``moefw generate``: text from a run's last checkpoint."""

from __future__ import annotations

import sys

import click

from moefw.commands import specs
from moefw.core.errors import printable


@click.command()
@click.argument("run", type=click.Path())
@click.argument("overrides", nargs=-1)
@click.option("--prompt", required=True, help="The text to go on from.")
@click.option("--tokens", type=click.IntRange(min=1), default=200, show_default=True, help="How many tokens to add.")
@click.option(
    "--window", type=click.IntRange(min=1), help="How many tokens the model sees at most.  [default: train.seq_len]"
)
@click.option("--temperature", type=float, default=0.7, show_default=True, help="0: always the best one.")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Same seed, same text.")
def generate(
    run: str, overrides: tuple[str, ...], prompt: str, tokens: int, window: int | None, temperature: float, seed: int
) -> int:
    """Continue a prompt with the last checkpoint of RUN (a run's folder), on this process alone.

    Keys and values of earlier tokens are kept. Once the window is full, the model goes on with its newer half. On a
    terminal, control characters are shown as escapes; a file or a pipe gets the text as it is.
    """
    if temperature != 0 and not 1e-3 <= temperature <= 1e3:
        raise click.BadParameter(f"{temperature} is neither 0 nor between 0.001 and 1000.", param_hint="--temperature")
    assembly = specs.read_run(run, overrides)
    from moefw.training.generate import RECOMPUTES, keeps_past
    from moefw.training.generate import generate as write
    from moefw.training.trained import open_trained

    with open_trained(assembly) as (session, _):
        if not keeps_past(session.model):
            click.echo(f"note: {RECOMPUTES}", err=True)
        window = window or assembly.spec.train.seq_len
        text = write(
            session.model, session.data, prompt, tokens=tokens, temperature=temperature, seed=seed, window=window
        )
    # Of a pipe, click would strip colors: what is not shown is not changed.
    click.echo(printable(text) if sys.stdout.isatty() else text, color=True)
    return 0
