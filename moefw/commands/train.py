"""``moefw train``: from a spec file to a trained model."""

from __future__ import annotations

import os
import sys

import click

from moefw.commands import specs
from moefw.training.folder import cache_dir, make_ready
from moefw.training.world import LAUNCHED, Place, die_with_launcher, place_from_environment, run_local_ranks


@click.command()
@click.argument("spec", type=click.Path())
@click.argument("overrides", nargs=-1)
@click.option("--resume", is_flag=True, help="Continue from the last checkpoint of run.dir.")
def train(spec: str, overrides: tuple[str, ...], resume: bool) -> int:
    """Train as SPEC says, with key=value overrides (train.steps=20).

    Starts the local ranks that the layout needs, or joins a torchrun or Slurm world when it finds one.
    """
    place = place_from_environment()
    assembly = specs.read(spec, overrides, place.world if place else None)
    starts_here = LAUNCHED not in os.environ and (place is None or place.rank == 0)
    note = make_ready(assembly, resume=resume) if starts_here else None
    if note:
        click.echo(note)
    if place is None:
        assembly.parts.data.prepare(cache_dir())
        if assembly.layout.world > 1:
            return run_local_ranks(sys.argv[1:], assembly.layout.world)
        place = Place(0, 1, 0, 1)
    die_with_launcher()
    from moefw.training import trainer

    trainer.train(assembly, place, resume=resume)
    return 0
