"""``moefw convert``: a Hugging Face folder as a run, and a run as such a folder."""

from __future__ import annotations

from pathlib import Path

import click

from moefw.commands import specs


@click.group()
def convert() -> None:
    """Turn a Hugging Face folder into a run, or a run's model into such a folder."""


@convert.command("import")
@click.argument("folder", type=click.Path())
@click.argument("run", type=click.Path())
def import_(folder: str, run: str) -> int:
    """Write the model of FOLDER (of Hugging Face) into RUN, a run's folder at step 0.

    `moefw generate RUN`, `moefw eval RUN` and `moefw train RUN/spec.yaml --resume` take it from there, in any layout.
    """
    from moefw.training.importing import import_folder

    import_folder(Path(folder), Path(run))
    click.echo(f"{run} holds the model of {folder} as its checkpoint of step 0")
    return 0


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
