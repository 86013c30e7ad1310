"""All ranks measure at once, as they train at once, and agree on each reading. Collective."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from statistics import median
from typing import Any, Final

import torch
from attrs import asdict, frozen
from torch.distributed import ProcessGroup

from moefw.planner.calibration.alone import Measurement
from moefw.planner.calibration.readings import Reading, of_all_ranks, of_moments
from moefw.runtime.communication.agreement import everywhere
from moefw.system.stamps import stamp

LONGEST: Final = 200
"""Characters of a reason: some libraries add the places in their code."""


@frozen(kw_only=True)
class Readings:
    """Readings of all ranks by the name of the measurement, and why others failed.

    ``share``: of the time of its threads that a rank had in each measurement; less than 1 if processors were shared
    with other work, or had nothing to do. Known of CPUs.
    """

    of: Mapping[str, Reading]
    failed: Mapping[str, str]
    share: Mapping[str, float]


def measured(
    measurements: Iterable[Measurement], group: ProcessGroup | None, *, on_cpu: bool, tell: Callable[[str], None]
) -> Readings:
    """Readings of all ranks of ``group``; None: of this rank alone. Collective.

    Ranks may have different measurements; each begins on all ranks that have it at the same time. One that is there
    several times is read at as many moments: the median counts. ``tell`` gets a line about each.
    """
    own = _numbered(measurements)
    lists = everywhere([[*key, each.unit] for key, each in own.items()], group)
    units = {(str(name), int(turn)): unit for of_rank in lists for name, turn, unit in of_rank}
    moments: dict[str, list[Reading]] = defaultdict(list)
    failed: dict[str, str] = {}
    share: dict[str, float] = {}
    for number, ((name, turn), unit) in enumerate(units.items(), 1):
        stamp(f"measuring {name}")
        answers = everywhere(_answer(own.get((name, turn))), group)
        problems = [f"rank {rank}: {answer['failed']}" for rank, answer in enumerate(answers) if answer.get("failed")]
        if problems:
            failed[name] = "; ".join(problems)
            tell(f"[{number}/{len(units)}] {name}: failed: {failed[name]}")
            continue
        measuring = [answer for answer in answers if answer]
        found = of_all_ranks([Reading(**answer["reading"]) for answer in measuring])
        moments[name].append(found)
        if on_cpu:
            share[name] = min(share.get(name, 1.0), median(answer["share"] for answer in measuring))
        tell(f"[{number}/{len(units)}] {name}: {in_words(found, unit)}")
    readings = {name: of_moments(each) for name, each in moments.items() if name not in failed}
    return Readings(of=readings, failed=failed, share=share)


def _numbered(measurements: Iterable[Measurement]) -> dict[tuple[str, int], Measurement]:
    """Measurements by name and turn: how many of that name came before."""
    turns: Counter[str] = Counter()
    found = {}
    for each in measurements:
        found[each.name, turns[each.name]] = each
        turns[each.name] += 1
    return found


def in_words(reading: Reading, unit: str) -> str:
    """A reading with its unit, repeats and spread."""
    return f"{reading.value:.4g} {unit} ({said_of(reading)})"


def said_of(reading: Reading) -> str:
    """Repeats and spread of a reading."""
    return f"{reading.repeats} repeats, A/A spread {100 * reading.spread:.1f} %"


def _answer(measurement: Measurement | None) -> dict[str, Any]:
    """What this rank says of a measurement, as JSON; empty if it has nothing to measure."""
    if measurement is None:
        return {}
    begun = time.perf_counter()
    begun_cpu = time.process_time()
    try:
        reading = measurement.read()
    except (RuntimeError, NotImplementedError) as error:
        first = (str(error) or type(error).__name__).splitlines()[0]
        return {"failed": first[:LONGEST]}
    if reading is None:
        return {}
    had = (time.process_time() - begun_cpu) / (time.perf_counter() - begun)
    return {"reading": asdict(reading), "share": min(1.0, had / torch.get_num_threads())}
