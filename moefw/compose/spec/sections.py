"""Sections of a spec. The options of a part are declared by its plugin, not here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import attrs
from attrs import Attribute, field, frozen
from attrs.validators import ge, gt, optional

from moefw.compose.spec.source import KeyPath, Tree
from moefw.core.choice import PluginChoice, chosen

RESERVED = ("use", "preset")


@frozen(kw_only=True)
class TrainSpec:
    """Length and hyperparameters of training. Token counts are global."""

    left_out: ClassVar[Mapping[str, str]] = {
        "reduce_gradients": "The layout says when FSDP reduces gradients, for each mesh: parallel.dense.zero: 1 and "
        "parallel.experts.zero: 1 (parallel.zero: 1 of coupled) reduce them once a step, and gather weights once, too."
    }
    weights: str | None = None
    """Hugging Face folder of the weights to start from; ``model.preset`` may be the same one. null: random weights."""
    freeze: tuple[str, ...] = ()
    """Names of weights that stay those of ``weights``, as patterns: ``layers.*.moe.experts.*``, ``embed.weight``.

    With an ``adapter``, all weights are frozen unless some are named here, and adapters always train.
    ``*`` stands for any characters. A frozen weight has no gradient, no decay and no optimizer state, is held in the
    dtype of its folder, and is not part of checkpoints, which name the folder instead. A frozen router keeps its
    biases, too.
    """
    record_routes: bool = False
    """Whether each token's experts are written into ``routes`` in the run's folder."""
    replay_routes: str | None = None
    """Folder of recorded routes of the same tokens, whose experts are taken in place of the router's choices.

    null: the router chooses.
    """
    steps: int = field(default=300, validator=ge(1))
    """Number of optimizer steps."""
    tokens_per_step: int = field(default=8192, validator=ge(1))
    """Number of tokens of a step, over all ranks and micro-batches; with ``packing``, on average."""
    micro_batch: int = field(default=4, validator=ge(1))
    """Number of sequences of a micro-batch, per rank; with ``packing``, a pack has at most the tokens of so many."""
    seq_len: int = field(default=512, validator=ge(2))
    """Number of tokens of a sequence; with ``packing``, the most: longer documents are in parts of so many."""
    packing: Literal["none", "static", "dynamic"] = "none"
    """Arrangement of documents in micro-batches. ``none`` cuts the text into sequences of ``seq_len`` tokens.

    Otherwise sequences are documents, longer ones in parts of ``seq_len``, and lie one behind another in packs of at
    most ``micro_batch * seq_len`` tokens. All ranks of cp share a pack (``static``), or as few as hold it in an equal
    share of these tokens, or as need to share a long sequence's work (``dynamic``).
    """
    document_mask: bool = False
    """Whether tokens attend within their document only, in training and evaluation; with ``packing``, always.

    Positions restart in each document, and no label crosses its end. false: a window of ``seq_len`` tokens is one
    document.
    """
    frozen_weights: Literal["decoded", "as_stored"] = "decoded"
    """Form in which frozen weights are held: ``decoded``, in bf16 as a rule, or ``as_stored``.

    With ``as_stored``, matrices that the folder has in FP8, MXFP4 or NVFP4 stay codes and scales, which products decode
    for each use (QLoRA). Nothing that is computed changes.
    """
    lr: float = field(default=3e-3, validator=gt(0.0))
    """Learning rate, which ``schedule`` multiplies by its factor of the step."""
    optimizer: PluginChoice = chosen("optimizer")
    """Optimizer of all parameters."""
    schedule: PluginChoice = chosen("schedule")
    """Schedule of the learning rate."""
    clip_norm: float | None = field(default=1.0, validator=optional(gt(0.0)))  # type: ignore[arg-type]
    """Largest norm of the whole gradient: a longer one is scaled down to it. null: gradients are not clipped."""
    main_gradients: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which micro-batches add up gradients that a rank holds whole.

    These are the gradients of matrices that FSDP does not shard, and with ``zero: 1`` of all parameters that it shards.
    They are fp32 when they are summed over ranks, and for the optimizer.
    """
    delay_wgrads: bool = False
    """Whether backward computes weight gradients of matrices while rows of experts travel between ranks.

    Each is computed behind the next start of a dispatch or combine in backward. A pipeline that has passes of weight
    gradients computes them there, not here.
    """
    graphs: Literal["none", "step"] = "none"
    """What a GPU replays as one graph (CUDA graph), which its host launches at once: nothing, or a step.

    Of a step: forward and backward of all micro-batches. Sums over ranks and the optimizer follow. The first three
    steps run without it.
    """
    on_failed_capture: Literal["stop", "eager"] = "stop"
    """Reaction to a step that cannot be captured as a graph: ``stop``, or ``eager``: go on without graphs."""
    eval_every: int = field(default=0, validator=ge(0))
    """Number of steps between evaluations on held-out text. One follows the last step in any case; 0: it alone."""
    eval_tokens: int = field(default=262144, validator=ge(1))
    """Number of held-out tokens of an evaluation, if there are as many."""
    checkpoint_every: int = field(default=0, validator=ge(0))
    """Number of steps between checkpoints. One follows the last step in any case; 0: it alone."""
    keep_checkpoints: int = field(default=2, validator=ge(1))
    """Number of the newest checkpoints that are kept."""
    keep_every: int = field(default=0, validator=ge(0))
    """Number of steps between checkpoints that are kept for good, beside the newest ones; 0: none is."""
    checkpoint: Literal["async", "sync"] = "async"
    """Whether training goes on while a checkpoint is written, from a copy in host memory (``async``), or waits."""
    fresh_optimizer: bool = False
    """Whether a run goes on from a checkpoint of another optimizer, with fresh states of its own.

    The old states are then not carried along; steps and the learning rate go on. States of the same optimizer are.
    """
    on_full_disk: Literal["stop", "continue"] = "stop"
    """Reaction to metrics or checkpoints that cannot be written: ``stop``, or ``continue`` with a warning.

    At the last checkpoint the run always stops.
    """
    on_bad_step: Literal["stop", "skip", "rerun"] = "stop"
    """Reaction to a step whose loss or gradient is not finite.

    ``skip`` leaves its batch out; ``rerun`` runs it once more, and stops if it is bad again. In the metrics,
    ``skipped_steps`` or ``rerun_steps`` is 1 in steps where this happened, and absent elsewhere.
    """
    loss_spike: float | None = field(default=2.0, validator=optional(gt(1.0)))  # type: ignore[arg-type]
    """Multiple of the mean of recent losses above which a loss causes a warning; null: never.

    In the metrics, ``loss_spikes`` is 1 in steps where this happened, and absent elsewhere.
    """

    @property
    def masks_documents(self) -> bool:
        """Whether tokens attend within their document only."""
        return self.document_mask or self.packing != "none"


def _names_a_folder(_: object, attribute: Attribute[str], value: str) -> None:
    if Path(value).name in ("", "..") or value.startswith("~"):
        raise ValueError(f"'{attribute.name}' must end in the name of a folder, and not begin with ~: {value!r}")


@frozen(kw_only=True)
class RunSpec:
    """Folder, seed, device, observers and timeout of a run."""

    dir: str = field(default="runs/default", validator=_names_a_folder)
    """Folder of the run's files. It ends in a name and does not begin with ~."""
    seed: int = field(default=0, validator=ge(0))
    """Seed of the initial parameters, the order of the data and the random draws of training."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device type; ``auto``: cuda where there is a GPU, else cpu."""
    observers: tuple[str, ...] = ()
    """Names of the plugins that observe the run."""
    timeout_s: float = field(default=600.0, validator=gt(0.0))
    """Seconds that a rank may go without progress (a batch, a shard, a piece of text) until the run ends."""


@frozen(kw_only=True)
class Spec:
    """A whole spec file. Missing sections without a default here are filled from the defaults file."""

    model: PluginChoice = chosen("model")
    attention: PluginChoice = chosen("attention")
    context_parallel: PluginChoice = chosen("context_parallel")
    routing: PluginChoice = chosen("router")
    dispatch: PluginChoice = chosen("dispatcher")
    gemm: PluginChoice = chosen("gemm")
    precision: PluginChoice = chosen("precision")
    memory: tuple[PluginChoice, ...] = chosen("memory_policy", default=())
    """Policies for what regions save for backward, and for optimizer states; empty: all is kept as it is."""
    adapter: PluginChoice = chosen("adapter")
    parallel: PluginChoice = chosen("layout")
    pipeline: PluginChoice = chosen("pipeline")
    data: PluginChoice = chosen("data_source")
    train: TrainSpec
    run: RunSpec = RunSpec()


def plugin_fields(section: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, str, Any]]:
    """Yield the path, kind and choice of every plugin that a spec names."""
    for place in attrs.fields(type(section)):
        value = getattr(section, place.name)
        here = (*path, place.name)
        kind = place.metadata.get("kind")
        if kind and isinstance(value, tuple):
            yield from (((*here, index), kind, choice) for index, choice in enumerate(value))
        elif kind:
            yield here, kind, value
        elif attrs.has(type(value)):
            yield from plugin_fields(value, here)


def inner_plugins(part: Any) -> list[Any]:
    """Plugins that the options of a plugin name."""
    return [inner for _, _, inner in plugin_fields(part)]


def with_defaults(tree: Tree, defaults: Tree) -> Tree:
    """``tree`` with its missing keys filled from ``defaults``, section by section.

    The options of a default choice are dropped if the user chose another plugin.
    """
    filled = dict(tree)
    for key, default in defaults.items():
        value = tree.get(key)
        if value is None:
            filled[key] = default
        elif isinstance(default, dict) and isinstance(value, dict) and _same("use", value, default):
            filled[key] = with_defaults(value, default)
    return filled


def over(base: Tree, tree: Tree) -> Tree:
    """``base`` with what ``tree`` says, mapping by mapping. Another ``use`` or ``kind`` drops what base says."""
    merged = dict(base)
    for key, value in tree.items():
        below = base.get(key)
        if not isinstance(below, dict) or not isinstance(value, dict):
            merged[key] = below if value is None and isinstance(below, dict) else value
        else:
            same = _same("use", value, below) and _same("kind", value, below)
            merged[key] = over(below, value) if same else value
    return merged


def _same(word: str, value: Tree, below: Tree) -> bool:
    """Whether both choose the same, or one leaves the choice to the other."""
    chosen = value.get(word)
    return word not in value or word not in below or (isinstance(chosen, str) and chosen == below[word])
