"""Published step times, and their prediction from the fields of a row alone."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Final

from attrs import evolve, frozen

from closed_form import SHARDED_WEIGHTS, Layout, Rows, Sizes, node_of
from moefw.core.records import Action, Entry, Order, Pair
from moefw.planner import cluster as clusters
from moefw.planner.cluster import Cluster
from moefw.planner.time.costs import Costs, Shapes
from moefw.planner.time.figures import figures
from moefw.planner.time.nodes import Nodes
from moefw.planner.time.scale import Fitted, Scale
from moefw.planner.time.schedule import Played, Steady
from moefw.planner.time.software import Implementation, Region, Software, implementation
from moefw.planner.time.step import StepTime, StepWork, step_time, step_work
from moefw.plugins.pipelines.interleaved import Interleaved
from moefw.plugins.pipelines.merged import Merged
from moefw.plugins.pipelines.one_stage import OneForwardOneBackward
from moefw.runtime.pipeline.timeline import one_by_one

ROWS: Final = Path(__file__).parent / "published" / "moe_rows.csv"
GIGA: Final = 1e9
TERA: Final = 1e12
PRESETS: Final[Mapping[str, str]] = {
    "DeepSeekV3": "deepseek-v3",
    "Kimi_K2": "kimi-k2",
    "Qwen3_235B": "qwen3-235b-a22b",
    "Qwen3_30B": "qwen3-30b-a3b",
    "Qwen2_57B": "qwen2-57b-a14b",
    "Mixtral_8x22B": "mixtral-8x22b",
    "GPT_OSS_120B": "gpt-oss-120b",
}
DTYPES: Final[Mapping[str, str]] = {
    "bf16": "bfloat16",
    "fp8": "float8_e4m3fn",
    "fp8block": "float8_e4m3fn",
    "mxfp8": "float8_e4m3fn",
    "nvfp4": "float4_e2m1fn_x2",
}
WORDS: Final[Mapping[str, Sequence[str]]] = {
    "precision": [*DTYPES],
    "dispatcher": ["", "alltoall", "deepep", "hybridep"],
    "ep_overlap": ["", "true", "false"],
}
"""Columns of words, with all that they may say."""
NEEDED: Final = ("gpus", "global_batch", "seq_len")
"""Columns of numbers that every row has to say."""
OPTIONAL: Final = ("micro_batch", "tp", "pp", "cp", "vpp", "ep", "etp")
"""Columns of numbers that are 1 where they are empty."""
WHOLE: Final = re.compile(r"0*[1-9][0-9]*(\.0*)?")
WITHOUT_MTP: Final = ("automodel", "simumax")
"""Stacks whose figures of DeepSeek-V3 are of a model that predicts one token."""
WITHOUT_FSDP: Final = ("", "no", "0", "false")
"""What the field of FSDP says where there is none."""
GATHERED_FOR_A_STEP: Final = "automodel"
"""The stack whose recipes keep weights gathered for a step."""
STACKS_OF_2025: Final = ("mcore25", "nemo25", "folding")
FEWEST_CHUNKS: Final = 2
"""Of a row with pp and overlap of expert transfers, which Megatron has with interleaved stages alone."""
ONE_LAYER_A_CHUNK: Final = "folding"
"""Rows whose chunks are not printed. The paper's schedule is Megatron's interleaved one."""
RECOMPUTED: Final[Mapping[str, tuple[str, ...]]] = {
    "mla_up_proj": ("mla_up_proj",),
    "mlp": ("dense_mlp",),
    "layernorm": ("attn_norm", "mlp_norm"),
    "norm": ("attn_norm", "mlp_norm"),
    "moe_act": (),
    "act": (),
    "full": (
        *("attn_norm", "qkv", "mla_down_proj", "mla_up_proj", "core_attn", "attn_proj"),
        *("mlp_norm", "router", "dispatch", "expert_fc1", "expert_fc2", "shared_experts", "dense_mlp"),
    ),
}
"""Regions that Megatron's modules of recompute are; activations alone are a few passes, which are left out.

``full`` is whole layers.
"""
ACCUMULATION: Final = re.compile(r"\bGA (\d+)")
RECIPES: Final = Path(__file__).parent / "published" / "recipes.csv"
FP8_HEAD: Final = "fp8_head"
"""What a recipe switches on of its software, that no page says."""
STATES: Final = "optimizer states"
"""What a row offloads that is no module."""


@frozen(slots=False)
class Row:
    """A published row: its fields, and what of its software an earlier row of the same layout says.

    ``changes``: of the software, and ``has_groups``: whether launches grow with experts a rank, to leave out inputs.
    """

    fields: Mapping[str, str]
    notes: str = ""
    overlap: str = ""
    changes: Mapping[str, object] = {}
    has_groups: bool = True

    def __getitem__(self, name: str) -> str:
        return self.fields.get(name, "") or ""

    def number(self, name: str, default: int = 1) -> int:
        """Whole number in a field; ``default`` if it is empty."""
        return int(float(self[name])) if self[name] else default

    def problems(self) -> list[str]:
        """What is wrong with the fields of a row, each with its column. Without any, it can be predicted."""
        wrong = [
            f"{column} is {self[column]!r}, and not one of {', '.join(filter(None, known))}"
            for column, known in WORDS.items()
            if self[column] not in known
        ]
        wrong += [f"{column} is missing" for column in NEEDED if not self[column]]
        wrong += [
            f"{column} is {self[column]!r}, and no whole number above 0"
            for column in (*NEEDED, *OPTIONAL)
            if self[column] and not WHOLE.fullmatch(self[column])
        ]
        return wrong or [*self._what_does_not_divide()]

    def _what_does_not_divide(self) -> Iterator[str]:
        """Yield what of a layout does not fit into its GPUs."""
        gpus, pp = self.number("gpus"), self.number("pp")
        dense = self.number("tp") * self.number("cp") * pp
        experts = self.number("ep") * self.number("etp") * pp
        if gpus % dense:
            yield f"tp, cp and pp are {dense} GPUs, which do not divide {gpus}"
        if gpus % experts:
            yield f"ep, etp and pp are {experts} GPUs, which do not divide {gpus}"
        if self.sizes.experts % self.number("ep"):
            yield f"ep is {self.number('ep')}, which does not divide {self.sizes.experts} experts"

    @property
    def is_scored(self) -> bool:
        """Whether the row counts."""
        return self["score"] == "yes"

    @property
    def name(self) -> str:
        """Name of the row's layout: rows of one name are votes of one."""
        return self["layout"] or self["id"]

    @property
    def stack(self) -> str:
        """Name of the fitted factor of the row's software; empty: Megatron of 2026."""
        if self["stack"] in STACKS_OF_2025:
            return "software_2025"
        return "" if self["stack"] in ("mcore26", "") else self["stack"]

    def factor(self, numbers: Fitted) -> float:
        """Fitted factor of the row's software."""
        if self.stack == "software_2025":
            return numbers.software_2025
        return numbers.stacks.get(self.stack, 1.0)

    @property
    def cluster(self) -> Cluster:
        """Cluster of the row."""
        return clusters.read(self["system"].lower().removeprefix("dgx-"))

    @property
    def sizes(self) -> Sizes:
        """Sizes of the row's model: of a preset, or of a ``config.json`` whose path is the model's name."""
        model = self["model"]
        is_deepseek = model == "DeepSeekV3"
        has_mtp = is_deepseek and self["stack"] not in WITHOUT_MTP and "w/o MTP" not in self["model_printed"]
        layers = self.number("layers", 0) or None
        return Sizes.of(PRESETS.get(model, model), layers=layers, mtp=int(has_mtp))

    @property
    def software(self) -> Software:
        """Software of the row. With a graph of a whole step, experts are a fused kernel, unless the row says else."""
        graph = self["cuda_graph"]
        is_full = graph == "full_iteration"
        scopes = graph.partition(":")[2]
        graphs: object = "full" if is_full else tuple(scopes.split("+")) if scopes else "none"
        known = self["notes"] + self.notes
        says = "recipe:" in known
        software = Software(
            implementation="megatron",
            graphs=graphs,  # type: ignore[arg-type]
            ep_overlap=(self["ep_overlap"] or self.overlap) == "true",
            fused_grouped_mlp="fused grouped MLP" in known or (is_full and not says),
            fp8_attention="fp8 attention" in known or (is_full and not says and self.is_narrow),
            fp8_head=FP8_HEAD in self.recipe.get("switched_on", ""),
            tensor_scales=self["precision"] == "fp8",
            offload=tuple(module for module in self.offload if module != STATES),
        )
        return evolve(software, **self.changes)

    @property
    def offload(self) -> Sequence[str]:
        """What waits in host memory: modules of Megatron, or the optimizer's states."""
        return [*filter(None, self["offload"].split("+"))]

    @property
    def is_narrow(self) -> bool:
        """Whether operands have 8 bits or less."""
        return DTYPES[self["precision"]] != "bfloat16"

    @property
    def layout(self) -> Layout:
        """Layout of the row."""
        pp = self.number("pp")
        chunks = self.number("vpp")
        if self["stack"] == ONE_LAYER_A_CHUNK and not self["vpp"] and pp > 1:
            chunks = self.sizes.layers // pp
        elif pp > 1 and self.software.ep_overlap:
            chunks = max(chunks, FEWEST_CHUNKS)
        return Layout(
            gpus=self.number("gpus"),
            tp=self.number("tp"),
            pp=pp,
            cp=self.number("cp"),
            chunks=chunks,
            ep=self.number("ep"),
            expert_tp=self.number("etp"),
            zero=SHARDED_WEIGHTS if self.shards_weights else 1,
            node_gpus=node_of(self.cluster),
        )

    @property
    def shards_weights(self) -> bool:
        """Whether weights are gathered in each micro-batch."""
        return self["fsdp"] not in WITHOUT_FSDP and self["stack"] != GATHERED_FOR_A_STEP

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.number("global_batch") * self.number("seq_len")

    @cached_property
    def flops_per_token(self) -> float:
        """Operations a token of the published TFLOPS, in units of 10^9.

        They are those of the closed form where none are said, and where the column counts an MTP layer that the row's
        TFLOPS over tokens/s do not.
        """
        said = self["flops_per_token"]
        is_wrong = self["stack"] == "automodel" and self["model"] == "DeepSeekV3"
        return self.work.flops_per_token / GIGA if is_wrong or not said else float(said)

    @cached_property
    def tokens_per_s(self) -> float:
        """Published tokens a second of a GPU: of the TFLOPS, which are rounded less."""
        return float(self["truth_tflops"]) * TERA / (self.flops_per_token * GIGA)

    @property
    def recipe(self) -> Mapping[str, str]:
        """Recipe of the row, which says of states and recompute what the page of the row does not; it may be empty."""
        return recipes().get(self["id"], {})

    @property
    def recomputed(self) -> Sequence[str]:
        """Modules that are recomputed, as the page of the row says, or its recipe where the page does not."""
        modules = self["recompute"] or self.recipe.get("recompute", "")
        return [*filter(None, modules.replace("none", "").split("+"))]

    @property
    def work(self) -> Rows:
        """What a rank computes in a micro-batch."""
        recompute = tuple(region for module in self.recomputed for region in RECOMPUTED[module])
        return Rows(
            sizes=self.sizes,
            layout=self.layout,
            sequences=self.number("micro_batch"),
            length=self.number("seq_len"),
            dtype=DTYPES[self["precision"]],
            recompute=recompute,
            dispatcher=self["dispatcher"] or "alltoall",
            states_on_host=STATES in self.offload,
        )

    @property
    def shapes(self) -> Shapes:
        """What decides the volume of the row's dispatcher."""
        rows = self.work
        sizes = rows.sizes
        return Shapes(
            tokens=rows.stream,
            hidden=sizes.dim,
            experts=sizes.experts,
            top_k=sizes.top_k,
            ep=rows.layout.ep,
            etp=rows.layout.expert_tp,
            dispatcher=self["dispatcher"] or "alltoall",
            groups=sizes.groups,
            top_groups=sizes.top_groups,
        )

    @property
    def key(self) -> tuple[object, ...]:
        """All that a prediction depends on."""
        return self.work.__repr__(), self.shapes, self.software, self["system"], self.tokens, self.accumulation_steps

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a rank in a step."""
        return max(1, self.number("global_batch") // (self.layout.dp * self.number("micro_batch")))

    @property
    def accumulation_steps(self) -> int:
        """Schedules that a step runs, one behind the other: NeMo's steps of gradient accumulation (``GA``)."""
        found = ACCUMULATION.search(self["notes"])
        said = int(found[1]) if found and self.layout.pp > 1 else 1
        return said if self.micro_batches % said == 0 else 1

    def order(self, count: int) -> Order:
        """Passes of each position in a step of so many micro-batches."""
        each = count // self.accumulation_steps
        once = self._schedule(each)
        return [
            [_later(entry, number * each) for number in range(self.accumulation_steps) for entry in entries]
            for entries in once
        ]

    def _schedule(self, count: int) -> Order:
        layout = self.layout
        merged = bool(self.software.ep_overlap)
        if layout.pp == 1:
            return Merged().order(1, count) if merged else [one_by_one(count)]
        if layout.chunks == 1:
            return OneForwardOneBackward().order(layout.pp, count)
        return Interleaved(chunks=layout.chunks, merged=merged).order(layout.pp, count)

    def step_work(self, predictor: Predictor) -> StepWork:
        """Work of a step of the row."""
        software = self.software
        runs = implementation(software.implementation)
        if not self.has_groups:
            runs = without_groups(runs)
        layout = self.layout
        costs = Costs(self.cluster, runs, software, self.shapes, figures(), Nodes.of(self.cluster, layout.node_gpus))
        return step_work(
            self.work.positions(),
            costs,
            steady=predictor.steady(self),
            micro_batches=self.micro_batches,
            ep_overlap=bool(software.ep_overlap),
        )


def _later(entry: Entry, by: int) -> Entry:
    """The same of a micro-batch with a number that is higher by so much."""
    if isinstance(entry, Pair):
        return Pair(forward=_later_pass(entry.forward, by), backward=_later_pass(entry.backward, by))
    return _later_pass(entry, by)


def _later_pass(action: Action, by: int) -> Action:
    return Action(action.kind, action.stage, action.micro_batch + by)


def without_groups(runs: Implementation) -> Implementation:
    """Implementation that launches as much for eight experts a rank, however many there are."""

    def flat(region: Region) -> Region:
        return Region(
            **{
                name: evolve(kernels, launches=kernels.launches + 8 * kernels.group, group=0.0)
                for name, kernels in (("forward", region.forward), ("backward", region.backward))
            }
        )

    return evolve(runs, regions={name: flat(region) for name, region in runs.regions.items()})


@frozen
class Predictor:
    """Predicts rows. The work of steps is kept, so that numbers can be fitted."""

    steps: dict[object, StepWork]
    of_rows: dict[str, tuple[StepWork, Cluster]]
    schedules: dict[object, Steady]

    @classmethod
    def empty(cls) -> Predictor:
        """Predictor that has seen no row."""
        return cls({}, {}, {})

    def step_time(self, row: Row, numbers: Fitted) -> StepTime:
        """Time of a row's step."""
        work, cluster = self._of(row)
        return step_time(work, Scale.of(numbers, cluster, figures()), row.factor(numbers))

    def steady(self, row: Row) -> Steady:
        """Schedule of a row's step."""
        layout = row.layout
        count = row.micro_batches
        key = layout.pp, layout.chunks, row.software.ep_overlap, row.accumulation_steps, count
        if key not in self.schedules:
            if row.accumulation_steps > 1:  # each of them fills and empties
                self.schedules[key] = Steady(Played.of(row.order(count)), None)
            else:
                self.schedules[key] = Steady.of(lambda few: Played.of(row.order(few)), layout.pp, count)
        return self.schedules[key]

    def same(self, row: Row) -> object:
        """What rows with one prediction have in common."""
        return id(self._of(row)[0]), row.stack

    def _of(self, row: Row) -> tuple[StepWork, Cluster]:
        if row["id"] not in self.of_rows:
            key = row.key
            if key not in self.steps:
                self.steps[key] = row.step_work(self)
            self.of_rows[row["id"]] = self.steps[key], row.cluster
        return self.of_rows[row["id"]]

    def tokens_per_s(self, row: Row, numbers: Fitted) -> float:
        """Predicted tokens a second of a GPU."""
        return row.tokens / self.step_time(row, numbers).step_s / row.number("gpus")


@cache
def recipes() -> Mapping[str, Mapping[str, str]]:
    """Recipes of rows, by the row's id."""
    with RECIPES.open(newline="", encoding="utf-8") as file:
        return {recipe["id"]: recipe for recipe in csv.DictReader(file)}


def read(path: Path = ROWS) -> list[Row]:
    """Rows of a file. What a row's page does not say of its software is that of the newest earlier row of its layout.

    Such a row has the same graphs and recompute.
    """
    with path.open(newline="", encoding="utf-8") as file:
        rows = [Row(fields) for fields in csv.DictReader(file)]
    return [_with_recipe(row, rows) for row in rows]


def _with_recipe(row: Row, rows: Sequence[Row]) -> Row:
    alike = [
        other
        for other in rows
        if other is not row
        and row["layout"]
        and all(other[name] == row[name] for name in ("layout", "cuda_graph", "recompute", "micro_batch", "stack"))
    ]
    notes = next((other["notes"] for other in alike if "recipe:" in other["notes"]), "")
    overlap = next((other["ep_overlap"] for other in alike if other["ep_overlap"]), "")
    return evolve(row, notes="" if "recipe:" in row["notes"] else notes, overlap=overlap)
