"""A run as its folder tells it, read once as a stream and kept in bounded size."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from attrs import Factory, define
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from moefw.core.errors import DataError
from moefw.report.buckets import Buckets
from moefw.report.loads import at_most
from moefw.training.records.events import EVENTS, read_events
from moefw.training.records.expert_load import EXPERT_LOAD, Window, read_expert_load
from moefw.training.records.experts import summary_in
from moefw.training.records.metrics import METRICS, read_metrics
from moefw.training.records.origins import ORIGINS, read_origins

Record = dict[str, Any]

GROUPS: Final = ("seconds", "grad_norms", "loss_shares")
"""The fields of a line that hold numbers by name. Their curves are called ``seconds/forward``."""
NO_CURVES: Final = ("step", "time")
FIX: Final = "Name the folder of a run that has made a step."
DAMAGED: Final = "Delete the line."


class Evaluation(NamedTuple):
    """An evaluation after ``step``: nats a token, and bits a byte if the tokenizer tells bytes."""

    step: int
    loss: float | None
    bits_per_byte: float | None


@define(eq=False)
class Run:
    """What a run has recorded. Whatever it has not is empty, or None.

    ``buckets``: the curves. Those of lists by layer are ``busiest/most``, ``busiest/median`` and so on. ``windows``:
    the load of all experts. ``spec`` and ``origins``: the resolved spec, and where each of its values came from.
    """

    folder: Path
    name: str
    buckets: Buckets = Factory(Buckets)
    evaluations: list[Evaluation] = Factory(list)
    first_time: float | None = None
    last_time: float | None = None
    layer_lists: dict[str, list[float | None]] = Factory(dict)
    """The lists by layer in the last line."""
    windows: list[Window] = Factory(list)
    events: list[Record] = Factory(list)
    spec: Record = Factory(dict)
    origins: dict[str, str] = Factory(dict)
    ledger: Record = Factory(dict)
    sample: str | None = None

    def of(self, kind: str) -> list[Record]:
        """Events of one kind."""
        return [event for event in self.events if event["event"] == kind]

    @property
    def start(self) -> Record:
        """The newest start or resume; empty for an older run."""
        return next((event for event in reversed(self.events) if event["event"] in ("start", "resume")), {})

    @property
    def end(self) -> Record | None:
        """The end of the newest start; None if the run is still going or was killed."""
        for event in reversed(self.events):
            if event["event"] in ("start", "resume"):
                return None
            if event["event"] == "end":
                return event
        return None

    def setting(self, *path: str) -> Any:
        """Value of the spec at a path of keys; None if there is none."""
        value: Any = self.spec
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        return value


def read_run(folder: Path, *, num_windows: int) -> Run:
    """Run in a folder, with at most ``num_windows`` windows of the load of its experts.

    Raises DataError if there is no run, if it has not made a step, or if a line of its files is damaged.
    """
    metrics = _metrics_of(folder)
    run = Run(folder, folder.resolve().name)
    recorded = at_most(_checked_windows(folder / EXPERT_LOAD), num_windows)
    of_lines = at_most(_read_lines(run, metrics), num_windows)
    run.windows = recorded or of_lines
    if not run.buckets.num_steps:
        raise DataError(f"{metrics} holds no step yet.", FIX)
    run.events = [_event(record, number, folder) for number, record in enumerate(read_events(folder / EVENTS), 1)]
    run.spec = _yaml(folder / "spec.yaml")
    run.origins = {key: str(origin) for key, origin in read_origins(folder / ORIGINS).items()}
    run.ledger = _json(folder / "ledger.json")
    sample = folder / "sample.txt"
    run.sample = sample.read_text(encoding="utf-8", errors="replace") if sample.is_file() else None
    return run


def cells(folder: Path) -> int:
    """Layers times experts of a run, by its first window or line; 0 if neither tells. Raises DataError."""
    of_lines = _loads_of_lines(_metrics_of(folder))
    first = next(chain(_checked_windows(folder / EXPERT_LOAD), of_lines), None)
    return 0 if first is None else first.load_LE.size


def _metrics_of(folder: Path) -> Path:
    if not folder.is_dir():
        raise DataError(f"{folder} is no folder.", FIX)
    metrics = folder / METRICS
    if not metrics.is_file():
        raise DataError(f"{folder} has no {METRICS}.", FIX)
    return metrics


def _read_lines(run: Run, path: Path) -> Iterator[Window]:
    """Fill the curves of a run with the lines of its metrics. Yield the loads that lines of older runs hold."""
    for number, record in enumerate(read_metrics(path), 1):
        step = _step(record, f"{path}:{number}")
        if step <= run.buckets.last_step:
            what = f"{path}:{number}: damaged line: step {step} follows step {run.buckets.last_step}."
            raise DataError(what, DAMAGED)
        lists = _lists(record)
        run.buckets.add(step, {**_numbers(record), **_over_layers(lists)})
        run.layer_lists = lists or run.layer_lists
        time = _number(record.get("time"))
        if time is not None:
            run.first_time = time if run.first_time is None else run.first_time
            run.last_time = time
        if "eval_loss" in record or "eval_bits_per_byte" in record:
            bits = _number(record.get("eval_bits_per_byte"))
            run.evaluations.append(Evaluation(step, _number(record.get("eval_loss")), bits))
        yield from _load_of_line(record, step)


def _step(record: object, where: str) -> int:
    step = record.get("step") if isinstance(record, dict) else None
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise DataError(f"{where}: damaged line: it has no step.", DAMAGED)
    return step


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _numbers(record: Mapping[str, Any]) -> dict[str, float | None]:
    """Numbers of a line by the name of their curve; null is None. Text and what else plugins may add is left out."""
    grouped = {
        f"{group}/{name}": value
        for group in GROUPS
        if isinstance(record.get(group), dict)
        for name, value in record[group].items()
    }
    named = {name: value for name, value in record.items() if name not in NO_CURVES} | grouped
    return {name: _number(value) for name, value in named.items() if value is None or isinstance(value, int | float)}


def _lists(record: Record) -> dict[str, list[float | None]]:
    """Lists by layer of a line; those that are not lists of numbers are left out."""
    summary: Any = summary_in(record)
    if not isinstance(summary, dict):
        return {}
    return {name: [_number(value) for value in values] for name, values in summary.items() if isinstance(values, list)}


def _over_layers(lists: Mapping[str, list[float | None]]) -> dict[str, float | None]:
    """Least, median, 90th percentile and most over layers of each list, each a value of a layer; ``dead`` is summed."""
    told: dict[str, float | None] = {}
    for name, values in lists.items():
        known = sorted(value for value in values if value is not None and math.isfinite(value))
        if not known:
            continue
        if name == "dead":
            told["dead/sum"] = sum(known)
            continue
        told[f"{name}/least"] = known[0]
        told[f"{name}/median"] = known[(len(known) - 1) // 2]
        told[f"{name}/p90"] = known[math.ceil(0.9 * len(known)) - 1]
        told[f"{name}/most"] = known[-1]
    return told


def _load_of_line(record: Record, step: int) -> Iterator[Window]:
    load: Any = record.get("expert_load")
    if isinstance(load, list) and load:
        load_LE = np.array(load, dtype=np.float64)
        if load_LE.ndim == 2:
            yield Window(step, step, tuple(range(len(load_LE))), load_LE)


def _loads_of_lines(path: Path) -> Iterator[Window]:
    for number, record in enumerate(read_metrics(path), 1):
        yield from _load_of_line(record, _step(record, f"{path}:{number}"))
        return


def _checked_windows(path: Path) -> Iterator[Window]:
    """Windows of a file. Raises DataError with the number of a line that is none, or not like the first."""
    number = 0
    shape: tuple[int, ...] = ()
    windows = read_expert_load(path)
    while True:
        number += 1
        try:
            window = next(windows)
            shape = shape or window.load_LE.shape
            if len(shape) != 2 or window.load_LE.shape != shape or len(window.layers) != shape[0]:
                raise ValueError("its load is not one of layers by experts")
        except StopIteration:
            return
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path}:{number}: damaged line: {error}.", DAMAGED) from error
        yield window


def _event(record: object, number: int, folder: Path) -> Record:
    if not isinstance(record, dict) or not isinstance(record.get("event"), str):
        raise DataError(f"{folder / EVENTS}:{number}: damaged line: it has no event.", DAMAGED)
    return {**record, "step": record["step"] if isinstance(record.get("step"), int) else 0}


def _json(path: Path) -> Record:
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is damaged: {error}.", "Delete it: the page is made without it.") from error
    return data if isinstance(data, dict) else {}


def _yaml(path: Path) -> Record:
    if not path.is_file():
        return {}
    try:
        data = YAML(typ="safe").load(path)
    except (YAMLError, ValueError) as error:
        raise DataError(f"{path} is damaged: {error}.", "Delete it: the page is made without it.") from error
    return data if isinstance(data, dict) else {}
