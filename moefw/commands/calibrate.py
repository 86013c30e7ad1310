"""``moefw bench calibrate``: this machine as a file of a cluster."""

from __future__ import annotations

import datetime
import socket
import subprocess
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import click
from attrs import frozen

import moefw
from moefw.commands.doctor.machine import usable_bytes, usable_cores
from moefw.commands.on_ranks import on_ranks
from moefw.compose.machine import this_machine
from moefw.compose.spec.sections import RunSpec
from moefw.core.errors import PlanError, SpecError, os_reason
from moefw.planner import cluster as clusters
from moefw.planner.calibration.readings import LEAST, REPEATS
from moefw.planner.cluster import THIS_MACHINE, Cluster
from moefw.planner.data_files import SUFFIX
from moefw.system.files import replaced_file
from moefw.training.world import Place, place_from_environment

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from moefw.planner.calibration.links import Group
    from moefw.planner.calibration.ranks import Readings

BUSY: Final = 0.8
"""The share of its threads' time that a rank has in a long product, if nothing else runs: 0.95 and more."""
NEEDS: Final = "A rank takes up to 1 GB, and 4 GB of a GPU."
MESSAGE_BYTES: Final = {"cpu": 16 << 20, "cuda": 256 << 20}
"""Sizes of large messages by device: smaller ones do not fill a link of it."""


@frozen(kw_only=True)
class _Options:
    """What the command was asked for."""

    ranks: int
    device: str
    repeats: int
    out: Path
    own: bool


@click.command()
@click.option(
    "--ranks",
    type=click.IntRange(min=1),
    help="Ranks that measure at once, and the links between them.  [default: one for each GPU, else 1]",
)
@click.option(
    "--output",
    "--out",
    type=click.Path(path_type=Path),
    metavar="FILE.yaml",
    help=f"Write this file.  [default: {THIS_MACHINE}{SUFFIX} among your own clusters, which commands know by name]",
)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option(
    "--repeats",
    type=click.IntRange(min=LEAST),
    default=REPEATS,
    show_default=True,
    help="Repeats of each measurement; one that takes long has fewer.",
)
def calibrate(ranks: int | None, output: Path | None, device: Literal["auto", "cpu", "cuda"], repeats: int) -> int:
    """Measure this machine, and write the file of its cluster: moefw plan SPEC --cluster this-machine.

    Products by format and size, copies in memory, what the host takes for an operator, and between ranks messages and
    collectives. Each figure is a median, beside how much two halves of its repeats differ. Leave the machine idle.

    Starts local ranks, or joins a torchrun or Slurm world: then the network between nodes is measured, too.
    """
    place = place_from_environment()
    options = _options(place, ranks, output, device, repeats)
    return on_ranks(partial(_calibrated, options), world=options.ranks, place=place, run=RunSpec(), needs=NEEDS)


def _options(
    place: Place | None, ranks: int | None, output: Path | None, device: Literal["auto", "cpu", "cuda"], repeats: int
) -> _Options:
    """Options, with what was left out. Raises PlanError or SpecError for those that cannot be."""
    machine = this_machine(device)
    gpus = machine.num_devices if machine.device == "cuda" else None
    if place is not None and ranks not in (None, place.world):
        what = f"--ranks {ranks}: torchrun or Slurm has started {place.world}."
        raise PlanError(what, "Leave --ranks out.", on_every_rank=True)
    world = place.world if place is not None else ranks or gpus or 1
    if place is None and gpus is not None and world > gpus:
        what = f"--ranks {world}: this machine has {gpus} GPUs, and ranks that share one measure parts of it."
        raise PlanError(what, f"Use --ranks {gpus} or fewer, or --device cpu." if gpus else "Use --device cpu.")
    out = output or clusters.own_folder() / f"{THIS_MACHINE}{SUFFIX}"
    if out.suffix != SUFFIX:
        raise SpecError(f"--output {out}: a cluster is a {SUFFIX} file.", f"Use {out.with_suffix(SUFFIX)}.")
    if output is not None and not out.parent.is_dir():
        raise SpecError(f"--output {out}: there is no folder {out.parent}.", "Make it, or name another file.")
    return _Options(ranks=world, device=machine.device, repeats=repeats, out=out, own=output is None)


def _calibrated(options: _Options, place: Place) -> None:
    """Measure on this rank, and write the file on the first one. Collective."""
    import torch
    import torch.distributed as dist

    from moefw.planner.calibration.alone import ON_A_CPU, ON_A_GPU, measurements
    from moefw.planner.calibration.links import LINKS, groups_of, link_measurements, opened
    from moefw.planner.calibration.ranks import measured
    from moefw.planner.calibration.result import measured_by
    from moefw.runtime.communication.agreement import everywhere
    from moefw.training.checked_steps import checks, with_checked
    from moefw.training.host_costs import host_measurements
    from moefw.training.session import device_of, joined
    from moefw.training.world import threads_of_a_rank

    device = device_of(options.device, place)
    sizes = ON_A_CPU if options.device == "cpu" else ON_A_GPU
    torch.set_num_threads(threads_of_a_rank(place.local_world))
    with (
        host_measurements(device, place.world, options.repeats) as of_host,
        checks(device, place.world, options.repeats) as of_steps,
        joined(device, place, timeout_s=RunSpec().timeout_s),
    ):
        world = dist.group.WORLD if place.world > 1 else None
        _agree(options, world)
        hosts = everywhere(socket.gethostname(), world)
        groups = [groups_of(rank, hosts) for rank in range(place.world)]
        of_links = opened(groups, place.rank) if world is not None else {}
        # Of all that is measured, what Python takes drifts most on a shared machine: so at three moments.
        planned = [*of_host, *measurements(device, sizes, options.repeats), *of_host]
        for link in LINKS:
            if link in of_links:
                nbytes = MESSAGE_BYTES[options.device]
                group = of_links[link]
                planned += link_measurements(link, group, device, nbytes=nbytes, repeats=options.repeats)
        planned += [*of_host, *(each.measurement for each in of_steps)]
        tell = partial(click.echo, err=True) if place.rank == 0 else lambda _: None
        readings = measured(planned, world, on_cpu=options.device == "cpu", tell=tell)
        if place.rank == 0:
            shared = _shared(readings)
            by = measured_by(moefw.__version__, datetime.date.today().isoformat())
            cluster = _cluster(readings, device, place, groups[0], shared, by)
            _write(with_checked(cluster, of_steps, readings, by), options)
            _say(readings, shared, options)


def _agree(options: _Options, world: ProcessGroup | None) -> None:
    """Raise PlanError on every rank if ranks were asked for different things, or run different releases."""
    from moefw.runtime.communication.agreement import everywhere

    asked = [moefw.__version__, options.device, options.repeats]
    others = everywhere(asked, world)
    for rank, other in enumerate(others):
        if other != others[0]:
            what = f"ranks differ: 0 is moefw {others[0][0]} on {others[0][1]} with {others[0][2]} repeats, {rank} is "
            what += f"moefw {other[0]} on {other[1]} with {other[2]}."
            raise PlanError(what, "Start the same command on all ranks.", on_every_rank=True)


def _cluster(
    readings: Readings, device: torch.device, place: Place, groups: list[Group], shared: float | None, by: str
) -> Cluster:
    """Cluster of the readings. ``groups``: those of this rank; ``by``: who measured."""
    import torch

    from moefw.planner.calibration.alone import ON_A_CPU, ON_A_GPU
    from moefw.planner.calibration.result import Surroundings, cluster_of
    from moefw.training.run_facts import computing_name
    from moefw_kernels.devices import is_gpu

    on_gpu = is_gpu(device)
    name = computing_name(device)
    here = place.local_world
    about = f"{name}: {place.world} rank{'' if place.world == 1 else 's'} at once, PyTorch {torch.__version__}"
    if shared is not None:
        about += f"; beside other work: a rank had {100 * shared:.0f} % of the time of its threads"
    around = Surroundings(
        about=about,
        name=name,
        memory_bytes=torch.cuda.mem_get_info(device)[1] if on_gpu else usable_bytes() // here,
        cores=max(1, usable_cores() // here),
        capability=_compute_capability(device) if on_gpu else None,
        board_power_w=_board_power_w(device) if on_gpu else None,
        threads=None if on_gpu else torch.get_num_threads(),
        ranks={group.link: len(group.ranks) for group in groups},
        message_bytes=MESSAGE_BYTES[device.type],
    )
    sizes = ON_A_GPU if on_gpu else ON_A_CPU
    return cluster_of(readings, around, sizes=sizes, by=by)


def _compute_capability(device: torch.device) -> float | None:
    """Compute capability of a GPU; None of one that is not CUDA's."""
    import torch

    if torch.version.cuda is None:
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return major + minor / 10


def _board_power_w(device: torch.device) -> float | None:
    """Power limit of a GPU in watts, which its driver tells; None, with a line, where it does not."""
    import torch

    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    command = ["nvidia-smi", f"--id={uuid}", "--query-gpu=power.limit", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
        return float(said)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        click.echo(f"board power: nvidia-smi does not tell it and it is left out: {error}", err=True)
        return None


def _shared(readings: Readings) -> float | None:
    """Share of the time of its threads that a rank had in long products, if that is little; None else."""
    long = [share for name, share in readings.share.items() if name.startswith("products")]
    most = max(long, default=1.0)
    return most if most < BUSY else None


def _write(cluster: Cluster, options: _Options) -> None:
    """Write the file. Raises SpecError if it cannot be written."""
    try:
        if options.own:
            options.out.parent.mkdir(parents=True, exist_ok=True)
        with replaced_file(options.out) as scratch:
            scratch.write_text(clusters.written(cluster), encoding="utf-8")
    except OSError as error:
        raise SpecError(f"--output {options.out}: {os_reason(error)}.", "Name another file.") from error


def _say(readings: Readings, shared: float | None, options: _Options) -> None:
    """Say what was left out, and how to use the file."""
    for name, reason in readings.failed.items():
        click.echo(f"left out: {name} could not be measured: {reason}", err=True)
    if shared is not None:
        what = f"this machine did other work meanwhile: a rank had {100 * shared:.0f} % of the time of its threads."
        click.echo(f"{what} Links, and ranks of several threads, are slower for it. Measure again later.", err=True)
    named = THIS_MACHINE if options.own else options.out
    click.echo(f"wrote {options.out}: moefw plan SPEC --cluster {named}")
