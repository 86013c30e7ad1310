"""``moefw generate``: text from a run's last checkpoint."""

from __future__ import annotations

import sys

import click

from moefw.commands import specs
from moefw.core.errors import DataError, printable


@click.command()
@click.argument("run", type=click.Path())
@click.argument("overrides", nargs=-1)
@click.option("--prompt", help="The text to go on from.")
@click.option("--chat", help="A question, asked as the chat template of the run's data has it.")
@click.option("--tokens", type=click.IntRange(min=1), default=200, show_default=True, help="How many tokens to add.")
@click.option(
    "--window",
    type=click.IntRange(min=1),
    help="How many tokens the model sees, the last ones.  [default: train.seq_len]",
)
@click.option("--temperature", type=float, default=0.7, show_default=True, help="0: always the best one.")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Same seed, same text.")
def generate(
    run: str,
    overrides: tuple[str, ...],
    prompt: str | None,
    chat: str | None,
    tokens: int,
    window: int | None,
    temperature: float,
    seed: int,
) -> int:
    """Continue a prompt, or answer a question, with the last checkpoint of RUN (a run's folder), on this process alone.

    Keys and values of earlier tokens are kept. Once the window is full, the model goes on with its newer half. On a
    terminal, control characters are shown as escapes; a file or a pipe gets the text as it is.
    """
    if temperature != 0 and not 1e-3 <= temperature <= 1e3:
        raise click.BadParameter(f"{temperature} is neither 0 nor between 0.001 and 1000.", param_hint="--temperature")
    if (prompt is None) == (chat is None):
        raise click.UsageError("Give either --prompt TEXT or --chat QUESTION.")
    assembly = specs.read_run(run, overrides)
    from moefw.training.generate import RECOMPUTES, keeps_past
    from moefw.training.generate import generate as write
    from moefw.training.trained import open_trained

    with open_trained(assembly) as (session, _, notes):
        for note in [*notes, *([] if keeps_past(session.model) else [RECOMPUTES])]:
            click.echo(f"note: {note}", err=True)
        window = window or assembly.spec.train.seq_len
        ids = session.data.encode(prompt) if prompt is not None else session.data.ask(chat or "")
        if ids is None:
            what = f"the data of this run ({assembly.parts.data.name}) has no conversations."
            raise DataError(what, "Use --prompt, or name its template: data={use: chat, ...}.")
        if len(ids) > window:
            cut = f"the model sees the last {window:,} of the {len(ids):,} tokens it is given"
            click.echo(f"note: {cut}; --window sets how many", err=True)
        text = write(session.model, session.data, ids, tokens=tokens, temperature=temperature, seed=seed, window=window)
    # Of a pipe, click would strip colors: what is not shown is not changed.
    click.echo(printable(text) if sys.stdout.isatty() else text, color=True)
    return 0
