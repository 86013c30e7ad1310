"""Predicted step times beside published ones: fits the planner's numbers, and writes ``docs/time.md``.

``python benchmarks/step_times.py > docs/time.md`` evaluates; ``--fit`` also writes the fitted numbers and the errors
of held-out rows, from which ``moefw plan`` has its error bars. ``--predict FILE.csv`` predicts any rows with the
columns of ``published/moe_rows.csv``, from their fields alone; the model of a row is one of the known names, a preset,
or the path of a ``config.json``.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, pairwise
from pathlib import Path
from statistics import correlation, mean, median
from typing import Final

from attrs import asdict, evolve, frozen

import record
from fitting import fit
from moefw.core.errors import MoefwError
from moefw.planner.time import likeness
from moefw.planner.time.likeness import HeldOut, Inputs
from moefw.planner.time.scale import FILE as FITTED
from moefw.planner.time.scale import GLOBAL, Fitted, fitted
from published_rows import Predictor, Row, read

PUBLISHED: Final = Path(__file__).parent / "published"
PLANS_APART: Final = 0.005
"""Share by which plans and closed forms may differ."""
STRUCTURE: Final = PUBLISHED / "structure.csv"
APART: Final = 0.05
"""Rows of one model that differ by more should be in order."""
COMMIT: Final = "git rev-parse --short HEAD"
Errors = Mapping[str, float]


def main() -> None:
    """Evaluate, fit or predict."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--predict", type=Path)
    parser.add_argument("--no-ablation", action="store_true")
    arguments = parser.parse_args()
    if arguments.predict is not None:
        predict(read(arguments.predict))
        return
    rows = read()
    scored = [row for row in rows if row.is_scored]
    predictor = Predictor.empty()
    numbers = fit(scored, predictor)
    by_model = held_out(scored, predictor, "model")
    by_system = held_out(scored, predictor, "system")
    if arguments.fit:
        write_numbers(numbers)
        write_held_out(scored, by_model)
    page = Page(rows, scored, predictor, numbers, by_model, by_system, not arguments.no_ablation)
    print("\n".join(page.lines()))


def held_out(rows: Sequence[Row], predictor: Predictor, field: str, near: Fitted | None = None) -> Errors:
    """Errors of all rows by numbers that were fitted without the rows with the same value in a field.

    ``near``: numbers at which fits start.
    """
    found: dict[str, float] = {}
    for left_out in sorted({row[field] for row in rows}):
        numbers = fit([row for row in rows if row[field] != left_out], predictor, near=near)
        found |= errors([row for row in rows if row[field] == left_out], predictor, numbers)
    return found


def errors(rows: Sequence[Row], predictor: Predictor, numbers: Fitted) -> Errors:
    """Errors of predicted tokens a second, as shares of the published ones."""
    return {row["id"]: predictor.tokens_per_s(row, numbers) / row.tokens_per_s - 1 for row in rows}


def votes(rows: Sequence[Row], found: Errors) -> list[float]:
    """Mean size of the errors of each layout, in order."""
    of_layout = defaultdict(list)
    for row in rows:
        if row["id"] in found:
            of_layout[row.name].append(abs(found[row["id"]]))
    return sorted(mean(each) for each in of_layout.values())


@frozen
class Summary:
    """Errors of layouts: shares. ``p90``: what 90 % are within."""

    mean: float
    median: float
    p90: float
    worst: float
    within_20: float

    @classmethod
    def of(cls, sizes: Sequence[float]) -> Summary:
        """Summary of sorted sizes of errors."""
        at_90 = sizes[min(len(sizes) - 1, round(0.9 * len(sizes) + 0.499) - 1)]
        return cls(mean(sizes), median(sizes), at_90, sizes[-1], sum(size <= 0.2 for size in sizes) / len(sizes))

    def __str__(self) -> str:
        shares = (self.mean, self.median, self.p90, self.worst)
        return " | ".join([*(f"{100 * each:.1f}" for each in shares), f"{100 * self.within_20:.0f} %"])


@frozen
class Pair:
    """Operations a second of a layout, or of a row: published, and predicted."""

    published: float
    predicted: float


def layouts_of_models(rows: Sequence[Row], of: Callable[[Row], float]) -> Mapping[str, Sequence[Pair]]:
    """Layouts of each model: means of their rows. ``of``: the predicted operations a second of a row."""
    layouts: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        layouts[row["model"], row.name].append(row)
    found: dict[str, list[Pair]] = defaultdict(list)
    for (model, _), each in layouts.items():
        found[model].append(Pair(mean(row.tokens_per_s * row.flops_per_token for row in each), mean(map(of, each))))
    return found


def order_inside_models(models: Mapping[str, Sequence[Pair]]) -> tuple[int, int]:
    """Pairs of layouts of one model whose published values differ by more than 5 %, and those in the same order."""
    pairs = in_order = 0
    for layouts in models.values():
        for one, other in combinations(layouts, 2):
            if abs(one.published / other.published - 1) > APART:
                pairs += 1
                in_order += (one.published > other.published) is (one.predicted > other.predicted)
    return pairs, in_order


def rank_correlations(models: Mapping[str, Sequence[Pair]]) -> Mapping[str, float]:
    """Spearman's coefficient of the layouts of each model that has three or more."""
    found = {}
    for model, layouts in models.items():
        if len(layouts) > 2:
            published = _ranks([pair.published for pair in layouts])
            found[model] = correlation(published, _ranks([pair.predicted for pair in layouts]))
    return found


def _ranks(values: Sequence[float]) -> list[float]:
    """Place of each value in their order."""
    order = sorted(values)
    return [float(order.index(value)) for value in values]


def regrets(rows: Sequence[Row], of: Callable[[Row], float]) -> Sequence[float]:
    """By what share the row with the largest prediction is worse than the best published one.

    Of each model, system and number of GPUs with several layouts.
    """
    choices: dict[tuple[str, str, str], list[Row]] = defaultdict(list)
    for row in rows:
        choices[row["model"], row["system"], row["gpus"]].append(row)
    found = []
    for each in choices.values():
        if len({row.name for row in each}) > 1:
            pairs = [Pair(row.tokens_per_s * row.flops_per_token, of(row)) for row in each]
            chosen = max(pairs, key=lambda pair: pair.predicted)
            found.append(1 - chosen.published / max(pair.published for pair in pairs))
    return found


def inputs_of(row: Row) -> Inputs:
    """What a row is like or unlike in."""
    software = row.software
    sizes = row.sizes
    layout = row.layout
    graphs = software.graphs if isinstance(software.graphs, str) else "scopes"
    return Inputs(
        implementation=row.stack or software.implementation,
        cluster=row["system"].lower(),
        precision=row.work.dtype,
        graphs=graphs,
        ep_overlap=bool(software.ep_overlap),
        dispatcher=row.shapes.dispatcher,
        gpus=layout.gpus,
        tp=layout.tp,
        pp=layout.pp,
        cp=layout.cp,
        ep=layout.ep,
        experts_a_rank=max(1, sizes.experts // layout.ep),
        hidden=sizes.dim,
        tokens_a_micro_batch=row.shapes.tokens,
        tokens_a_sequence=row.work.length,
    )


def errors_over_bars(rows: Sequence[Row], found: Errors) -> list[tuple[float, float]]:
    """Error of each row as a share of its bar, made without the rows of its model, and the row's vote; in order."""
    held = [HeldOut(row.name, inputs_of(row), found[row["id"]]) for row in rows]
    names = [row.name for row in rows]
    shares = []
    for row, own in zip(rows, held, strict=True):
        others = [other for other, each in zip(held, rows, strict=True) if each["model"] != row["model"]]
        vote = 1 / names.count(row.name) / len(set(names))
        shares.append((100 * abs(own.error) / likeness.bar(own.inputs, others).percent, vote))
    return sorted(shares)


def needed_width(shares: Sequence[tuple[float, float]]) -> float:
    """Share of their width at which bars hold 80 % of votes, given :func:`errors_over_bars`."""
    inside = 0.0
    for share, vote in shares:
        inside += vote
        if inside >= 0.8:
            return share
    raise AssertionError("all votes together are more than 80 %")


def write_numbers(numbers: Fitted) -> None:
    """Write the fitted numbers."""
    stacks = ", ".join(f"{name}: {value:.4f}" for name, value in numbers.stacks.items())
    lines = [f"{name}: {getattr(numbers, name):.4f}" for name in (*GLOBAL, "software_2025")]
    head = "# Written by `python benchmarks/step_times.py --fit`."
    FITTED.write_text("\n".join([head, *lines, f"stacks: {{{stacks}}}"]) + "\n", encoding="utf-8")


def write_held_out(rows: Sequence[Row], found: Errors) -> None:
    """Write the errors of held-out rows with what rows are like in."""
    with likeness.FILE.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        names = list(asdict(inputs_of(rows[0])))
        writer.writerow(["layout", *names, "error"])
        for row in rows:
            writer.writerow([row.name, *asdict(inputs_of(row)).values(), f"{found[row['id']]:.4f}"])


def predict(rows: Sequence[Row]) -> None:
    """Print each row with its prediction, its error bar, and what is extrapolated, as CSV."""
    predictor = Predictor.empty()
    numbers = fitted()
    names = ["step_time_s", "tokens_per_s_per_gpu", "model_tflops_per_gpu", "error_percent", "extrapolated"]
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["id", *(f"predicted_{name}" for name in names)])
    for row in rows:
        try:
            reasons = row.problems()
            predicted = [] if reasons else _prediction(row, predictor, numbers)
        except (MoefwError, ArithmeticError, LookupError, ValueError) as error:
            reasons = [f"{type(error).__name__}: {' '.join(str(error).split())}"]
        if reasons:
            predicted = ["", "", "", "", f"not predicted, {'; '.join(reasons)}"]
        writer.writerow([row["id"], *predicted])


def _prediction(row: Row, predictor: Predictor, numbers: Fitted) -> Sequence[str]:
    step = predictor.step_time(row, numbers)
    tokens = predictor.tokens_per_s(row, numbers)
    bar = likeness.bar(inputs_of(row), likeness.held_out())
    tflops = f"{tokens * row.flops_per_token / 1e3:.1f}"
    return f"{step.step_s:.5g}", f"{tokens:.1f}", tflops, f"{bar.percent:.1f}", " ".join(bar.extrapolated)


@frozen
class Page:
    """The page of documentation."""

    rows: Sequence[Row]
    scored: Sequence[Row]
    predictor: Predictor
    numbers: Fitted
    by_model: Errors
    by_system: Errors
    ablates: bool

    def lines(self) -> Iterator[str]:
        """Yield the page's lines."""
        yield (PUBLISHED / "time_head.md").read_text(encoding="utf-8").rstrip()
        yield from self._numbers()
        yield from self._summaries()
        yield from self._plans()
        if self.ablates:
            yield from self._ablation()
        yield from self._structure()
        yield from self._all_rows()

    def _numbers(self) -> Iterator[str]:
        commit = subprocess.run(COMMIT.split(), capture_output=True, text=True, check=True).stdout.strip()
        yield f"\n## Fitted numbers\n\nFitted on the code of commit {commit}.\n"
        yield "| number | value |\n|---|---|"
        for name in (*GLOBAL, "software_2025"):
            yield f"| `{name}` | {getattr(self.numbers, name):.3f} |"
        for name, value in self.numbers.stacks.items():
            yield f"| `stacks.{name}` | {value:.3f} |"

    def _summaries(self) -> Iterator[str]:
        scored = self.scored
        number = len({row.name for row in scored})
        yield f"\n## Errors\n\n{len(scored)} rows of {number} layouts, in percent of the published figure.\n"
        yield "| predicted by | mean | median | 90 % within | worst | layouts within 20 % |\n|---|---|---|---|---|---|"
        everything = errors(scored, self.predictor, self.numbers)
        for name, found in {
            "numbers fitted to all rows": everything,
            "numbers fitted without the row's model": self.by_model,
            "numbers fitted without the row's system": self.by_system,
            "the median of other layouts of the system and precision": baseline_median(scored),
            "the nearest row of another model": baseline_nearest(scored, same_model=False),
            "the nearest row of another layout": baseline_nearest(scored, same_model=True),
        }.items():
            yield f"| {name} | {Summary.of(votes(scored, found))} |"
        noise = sorted(noise_floor(scored))
        yield f"\nThe same row in the next release differs by {100 * median(noise):.1f} % (median of {len(noise)}),"
        yield f"90 % of them by at most {100 * Summary.of(noise).p90:.1f} %."

        def tflops(row: Row) -> float:
            return (1 + self.by_model[row["id"]]) * row.tokens_per_s * row.flops_per_token

        models = layouts_of_models(scored, tflops)
        pairs, in_order = order_inside_models(models)
        yield f"\nOf {pairs} pairs of layouts of one model that differ by more than 5 %, {in_order} are in order"
        yield f"({100 * in_order / pairs:.0f} %), by numbers fitted without that model."
        ranks = ", ".join(f"{name} {value:.2f}" for name, value in sorted(rank_correlations(models).items()))
        yield f"Rank correlation (Spearman) of the layouts of each model that has three: {ranks}."
        worse = regrets(scored, tflops)
        yield f"\nOf {len(worse)} choices among layouts of one model, system and number of GPUs, the predicted best is"
        yield f"{100 * mean(worse):.1f} % worse than the published best on average, {100 * max(worse):.1f} % at most."
        shares = errors_over_bars(scored, self.by_model)
        inside = sum(vote for share, vote in shares if share <= 1)
        yield f"\n{100 * inside:.0f} % of layouts lie inside their 80 % bars, made of the errors of other models' rows."
        yield f"Bars of {needed_width(shares):.2f} times their width would hold 80 %."

    def _plans(self) -> Iterator[str]:
        path = record.RESULTS / "full_size.json"
        if not path.exists():
            return
        found = json.loads(path.read_text(encoding="utf-8"))
        apart = {name: abs(row["apart"]) for name, row in found["rows"].items()}
        far = [name for name in apart if apart[name] > PLANS_APART]
        near = max(share for name, share in apart.items() if name not in far)
        yield "\n## Plans of the same layouts\n"
        yield "Numbers are fitted to closed forms of rows' work. `python benchmarks/full_size.py` plans rows, too:"
        yield f"the {len(apart)} different ones at full size, with `--as megatron`, on the code of commit"
        yield f"{found['commit'][:8]}. Plans and closed forms are at most {100 * near:.2f} % apart, but for"
        yield f"{', '.join(f'{name} ({100 * apart[name]:.1f} %)' for name in far) or 'none'}."
        yield "Errors, with numbers fitted to all rows:\n"
        yield "| | mean | median | 90 % within | worst | layouts within 20 % |\n|---|---|---|---|---|---|"
        for name, errors_of in found["errors"].items():
            yield f"| {name} | {Summary(**errors_of)} |"

    def _ablation(self) -> Iterator[str]:
        yield "\n## What each input is worth\n"
        yield "Mean and median error of layouts with numbers fitted without the row's model, if an input is left out.\n"
        yield "| left out | mean | median |\n|---|---|---|"
        whole = Summary.of(votes(self.scored, self.by_model))
        yield f"| nothing | {100 * whole.mean:.1f} | {100 * whole.median:.1f} |"
        for name, change in ablations().items():
            rows = [change(row) for row in self.scored]
            alone = evolve(Predictor.empty(), schedules=self.predictor.schedules)
            found = held_out(rows, alone, "model", self.numbers)
            summary = Summary.of(votes(rows, found))
            yield f"| {name} | {100 * summary.mean:.1f} | {100 * summary.median:.1f} |"

    def _structure(self) -> Iterator[str]:
        yield "\n## Changes of structure since the first fit\n"
        yield "Errors of layouts after each change, in percent: mean, median, and the 23rd of 26.\n"
        yield "| change | without the model | without the system |\n|---|---|---|"
        with STRUCTURE.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                model = f"{row['model_mean']}, {row['model_median']}, {row['model_p90']}"
                system = f"{row['system_mean']}, {row['system_median']}, {row['system_p90']}"
                yield f"| {row['change']} | {model} | {system} |"

    def _all_rows(self) -> Iterator[str]:
        yield "\n## Every row\n"
        yield "Errors in percent: of numbers fitted to all rows, without the row's model, and without its system.\n"
        head = "layout | model | GPUs | precision | tp pp chunks ep | micro-batch | graphs | release"
        yield f"| row | {head} | TFLOPS | predicted | all | model | system |"
        yield "|" + "---|" * 14
        for row in self.rows:
            yield self._row(row)

    def _row(self, row: Row) -> str:
        layout = " ".join(row[name] or "-" for name in ("tp", "pp", "vpp", "ep"))
        graphs = row["cuda_graph"].removeprefix("transformer_engine:") or "-"
        about = [row.name, row["model_printed"], f"{row['gpus']} {row['system']}", row["precision"], layout]
        about += [row["micro_batch"] or "-", graphs, row["release"].partition(" (")[0]]
        published = f"{float(row['truth_tflops']):.0f}"
        if row.is_scored:
            predicted = self.predictor.tokens_per_s(row, self.numbers)
            tflops = f"{predicted * row.flops_per_token / 1e3:.0f}"
            shares = (predicted / row.tokens_per_s - 1, self.by_model[row["id"]], self.by_system[row["id"]])
            found = [tflops, *(f"{100 * share:+.1f}" for share in shares)]
        else:
            found = [f"not scored: {row['why_not']}", "", "", ""]
        return f"| {row['id']} | {' | '.join(about)} | {published} | {' | '.join(found)} |"


def baseline_median(rows: Sequence[Row]) -> Errors:
    """Errors of the median TFLOPS of other layouts of the same system and precision; of the system if there is none."""
    found = {}
    for row in rows:
        others = [each for each in rows if each.name != row.name and each["system"] == row["system"]]
        alike = [each for each in others if each["precision"] == row["precision"]] or others
        guess = median(float(each["truth_tflops"]) for each in alike or rows)
        found[row["id"]] = guess / float(row["truth_tflops"]) - 1
    return found


def baseline_nearest(rows: Sequence[Row], *, same_model: bool) -> Errors:
    """Errors of the TFLOPS of the row that is most alike, of another layout, or of another model, too."""
    found = {}
    inputs = {row["id"]: inputs_of(row) for row in rows}
    for row in rows:
        others = [each for each in rows if each.name != row.name and (same_model or each["model"] != row["model"])]
        nearest = min(others, key=lambda each: likeness.distance(inputs[row["id"]], inputs[each["id"]]))
        found[row["id"]] = float(nearest["truth_tflops"]) / float(row["truth_tflops"]) - 1
    return found


def noise_floor(rows: Sequence[Row]) -> Iterator[float]:
    """Yield by how much rows of one layout and software differ from release to release."""
    alike: dict[object, list[Row]] = defaultdict(list)
    for row in rows:
        if row["source"].startswith("NVIDIA Megatron Bridge"):
            alike[row.key].append(row)
    for group in alike.values():
        ordered = sorted(group, key=lambda row: row["release"])
        for earlier, later in pairwise(ordered):
            if earlier["release"] != later["release"]:
                yield abs(later.tokens_per_s / earlier.tokens_per_s - 1)


def ablations() -> Mapping[str, Callable[[Row], Row]]:
    """Changes of rows that leave out an input each."""

    def with_software(**changes: object) -> Callable[[Row], Row]:
        return lambda row: evolve(row, changes={**row.changes, **changes})

    return {
        "graph scopes: no graphs anywhere": with_software(graphs="none"),
        "launches of the host: graphs of a whole step everywhere": with_software(graphs="full"),
        "fused grouped MLP": with_software(fused_grouped_mlp=False),
        "FP8 attention": with_software(fp8_attention=False),
        "overlap of expert transfers": with_software(ep_overlap=False),
        "dispatchers: all are alltoall": lambda row: with_field(row, "dispatcher", "alltoall"),
        "experts a rank in launches": lambda row: evolve(row, has_groups=False),
        "recompute": lambda row: with_field(row, "recompute", "none"),
        "micro-batches: all are of one sequence": lambda row: with_field(row, "micro_batch", "1"),
        "chunks: one stage a rank": lambda row: with_field(row, "vpp", "1"),
    }


def with_field(row: Row, name: str, value: str) -> Row:
    """Row with another value in a field."""
    return evolve(row, fields={**row.fields, name: value})


if __name__ == "__main__":
    main()
