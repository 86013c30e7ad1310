"""``moefw convert``: a Hugging Face folder as a run, a run as such a folder, a dense model as one with experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from moefw.commands import specs


@click.group()
def convert() -> None:
    """Turn a Hugging Face folder into a run, a run's model into such a folder, a dense model into one with experts."""


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
@click.option(
    "--dtype",
    type=click.Choice(["bf16", "fp32", "fp8", "mxfp4", "nvfp4"]),
    help="How the folder holds weights, bf16 by default. As codes: fp8, mxfp4, nvfp4; what has not trained is copied.",
)
@click.option(
    "--adapter",
    type=click.Choice(["merge", "peft", "vllm"]),
    default="merge",
    show_default=True,
    help="Adapters of the run: merged into the weights, or alone (in fp32), in the files of PEFT or those of vLLM.",
)
@click.option("--step", type=click.IntRange(min=0), help="The checkpoint of a step; by default the last.")
def export(run: str, folder: str, dtype: Any, adapter: Any, step: int | None) -> int:
    """Write a checkpoint of RUN (a run's folder) into FOLDER, which transformers loads, or peft its adapter."""
    if dtype is not None and adapter != "merge":
        raise click.UsageError("Adapters alone are in fp32: leave --dtype out, or merge them.")
    assembly = specs.read_run(run, ())
    from moefw.training.exporting import Form
    from moefw.training.exporting import export as write
    from moefw.training.resume import candidates

    ((number, checkpoint),) = candidates(Path(run), "last" if step is None else step)
    if adapter != "merge":
        from moefw.training.exporting_adapters import export_adapter

        left_out = export_adapter(assembly, checkpoint, Path(folder), adapter)
        click.echo(f"{folder} holds the adapter of step {number}, of {assembly.spec.train.weights}")
        if left_out:
            click.echo(
                f"left out, as transformers builds no layers that predict further tokens: {len(left_out)} tensors"
            )
        return 0
    form: Form = dtype or "bf16"
    written = write(assembly, checkpoint, Path(folder), form)
    click.echo(f"{folder} holds the model of step {number}: {written.family}, {form}")
    for line in written.told:
        click.echo(line)
    return 0


@convert.command()
@click.argument("source", type=click.Path())
@click.argument("run", type=click.Path())
@click.option("--experts", type=click.IntRange(min=1), required=True, help="Experts of a layer: copies x granularity.")
@click.option("--top-k", type=click.IntRange(min=1), required=True, help="Experts of a token.")
@click.option(
    "--granularity",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Slices of each MLP, of which an expert is a copy.",
)
@click.option("--pre-softmax", is_flag=True, help="Weights are a softmax over all experts, not over the chosen ones.")
@click.option(
    "--scaling",
    type=click.Choice(["exact", "paper"]),
    default="exact",
    show_default=True,
    help="Where the scale of outputs goes: exact, up and down; paper, a third of its power in all three matrices.",
)
def upcycle(source: str, run: str, experts: int, top_k: int, granularity: int, pre_softmax: bool, scaling: Any) -> int:
    """Write a dense SOURCE with experts into RUN, a run's folder at step 0 (arXiv 2410.07524).

    SOURCE is a Hugging Face folder or the folder of a run. Without --pre-softmax the model computes what SOURCE does.
    """
    dense_run = specs.read_run(source, ()) if (Path(source) / "spec.yaml").is_file() else None
    from moefw.training import upcycling

    dense = upcycling.dense_of_run(dense_run) if dense_run else upcycling.dense_of_folder(Path(source), Path(run))
    how = upcycling.Upcycling(
        num_experts=experts, top_k=top_k, granularity=granularity, pre_softmax=pre_softmax, scaling=scaling
    )
    upcycling.upcycle(dense, how, Path(run))
    click.echo(f"{run} holds the model of {source} with {experts} experts a layer as its checkpoint of step 0")
    return 0
