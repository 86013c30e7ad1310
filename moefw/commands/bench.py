"""``moefw bench``: what is measured on a machine, and used from then on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click

from moefw.commands import specs
from moefw.commands.calibrate import calibrate
from moefw.compose.assembly import Assembly
from moefw.core.errors import PlanError, RunError
from moefw.plugins.gemm.triton import Triton
from moefw.plugins.gemm.triton.table import Table, write

if TYPE_CHECKING:
    import torch

    from moefw.plugins.gemm.triton.measure import Sizes
    from moefw_kernels.expert_gemm import Tile


@click.group()
def bench() -> None:
    """Measure on this machine what is used from then on."""


bench.add_command(calibrate)


@bench.command()
@click.argument("spec", type=click.Path())
@click.argument("overrides", nargs=-1)
@click.option("--world", type=click.IntRange(min=1), help="Ranks to lay out over; by default the smallest that fits.")
@click.option("--out", type=click.Path(dir_okay=False), required=True, help="File for the table.")
def tiles(spec: str, overrides: tuple[str, ...], world: int | None, out: str) -> None:
    """Time the products of SPEC's experts with each tile of gemm: triton, and write the fastest to a table.

    Sizes are those of a rank and a micro-batch whose tokens are spread evenly. A tile that gives wrong values is told,
    and left out. The table is for this GPU and this release of Triton: gemm: {use: triton, tiles: FILE}.
    """
    import torch

    assembly = specs.read(spec, overrides, world)
    if not isinstance(assembly.parts.gemm, Triton):
        raise PlanError(
            f"{spec} has gemm: {assembly.parts.gemm.name}, which has no tiles.", "Add gemm.use=triton to the command."
        )
    if not torch.cuda.is_available():
        raise RunError("moefw bench tiles measures on a GPU, and torch sees none.", "Run it where the model trains.")
    table = fastest(sizes_of(assembly), torch.device("cuda"), microseconds)
    write(table, out)
    for name, tile in table.tiles.items():
        columns, depth, warps, stages = tile
        time = min(table.microseconds[name].values())
        click.echo(f"{name}: {columns} columns, {depth} deep, {warps} warps, {stages} stages: {time:.1f} microseconds")
    click.echo(f"wrote {out}: gemm: {{use: triton, tiles: {out}}}")


def sizes_of(assembly: Assembly) -> Sizes:
    """Sizes of the products of experts on a rank, of a micro-batch whose tokens are spread evenly."""
    from moefw.plugins.gemm.triton.measure import Sizes

    dims = assembly.site.dims
    train = assembly.spec.train
    size_of = assembly.layout.sizes
    experts = dims.num_experts // size_of["ep"]
    tokens = train.micro_batch * train.seq_len // (size_of["tp"] * size_of["cp"])
    # The ranks that share experts bring all of their tokens; etp ranks compute parts of the same ones.
    per_expert, more = divmod(tokens * dims.top_k * size_of["etp"], experts)
    return Sizes(
        dim=dims.model_dim,
        expert_dim=dims.expert_dim // size_of["etp"],
        counts=[per_expert + (expert < more) for expert in range(experts)],
    )


def fastest(sizes: Sizes, device: torch.device, clock: Callable[[Callable[[], Any]], float]) -> Table:
    """Table of the tiles with the shortest times. Raises RunError for a product that no tile gives rightly."""
    import torch
    import triton

    from moefw.plugins.gemm.triton.measure import measured
    from moefw_kernels.expert_gemm import CANDIDATES

    times = measured(sizes, device, clock)
    for name, of_tiles in times.items():
        wrong = [tile for tile in CANDIDATES[name] if tile not in of_tiles]
        if len(wrong) == len(CANDIDATES[name]):
            raise RunError(f"no tile of gemm triton gives the right values of {name} here.", "Use gemm: grouped.")
        for tile in wrong:
            click.echo(f"{name}: {list(tile)} gives wrong values here and is left out", err=True)
    rows = sum(sizes.counts)
    return Table(
        gpu=torch.cuda.get_device_name(device),
        triton=triton.__version__,
        sizes={"dim": sizes.dim, "expert_dim": sizes.expert_dim, "experts": len(sizes.counts), "rows": rows},
        tiles={name: _fastest_of(of_tiles) for name, of_tiles in times.items()},
        microseconds={name: {str(list(tile)): time for tile, time in each.items()} for name, each in times.items()},
    )


def _fastest_of(times: Mapping[Tile, float]) -> Tile:
    tile, _ = min(times.items(), key=lambda timed: timed[1])
    return tile


def microseconds(call: Callable[[], Any]) -> float:
    """Median time of a call on the GPU."""
    from triton.testing import do_bench

    time: float = 1000 * do_bench(call, return_mode="median")
    return time
