"""``moefw convert``: models of Hugging Face and back."""

from __future__ import annotations

from pathlib import Path

import click

from moefw.commands import specs


@click.group()
def convert() -> None:
    """Hand a run's model to other tools."""


@convert.command()
@click.argument("run", type=click.Path())
@click.argument("folder", type=click.Path())
@click.option("--dtype", type=click.Choice(["bf16", "fp32"]), default="bf16", show_default=True)
@click.option("--step", type=click.IntRange(min=0), help="The checkpoint of a step; by default the last.")
def export(run: str, folder: str, dtype: str, step: int | None) -> int:
    """Write a checkpoint of RUN (a run's folder) into FOLDER, which transformers loads."""
    assembly = specs.read_run(run, ())
    import torch

    from moefw.training.exporting import export as write
    from moefw.training.resume import candidates

    ((number, checkpoint),) = candidates(Path(run), "last" if step is None else step)
    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32}
    family = write(assembly, checkpoint, Path(folder), dtypes[dtype])
    click.echo(f"{folder} holds the model of step {number}: {family}, {dtype}")
    return 0
