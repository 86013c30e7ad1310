"""Models from Hugging Face folders, and back: the same module on one process, or split over the ranks of a world."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Never, final

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moefw.compose.adapter_weights import read_adapter
from moefw.compose.assembly import Assembly
from moefw.compose.build import Shared, build_model, open_layout
from moefw.compose.defaults import defaults
from moefw.compose.devices import Device, device_here
from moefw.compose.freeze_patterns import useless_patterns
from moefw.compose.given_routes import RoutesOfText
from moefw.compose.resolve import assemble_tree
from moefw.compose.router_steps import RouterSteps, mean_scale
from moefw.compose.spec.source import Marks, Tree
from moefw.core.contracts import Layout
from moefw.core.errors import CheckpointError, ContractError, MoefwError, SpecError, os_reason
from moefw.core.stages import Batch, LayerStats
from moefw.models.embedding import IGNORED
from moefw.models.huggingface.config import read_config
from moefw.models.huggingface.families import family_of
from moefw.models.huggingface.folder import Folder
from moefw.models.huggingface.handed_on import HANDED_ON, hand_on
from moefw.models.huggingface.loading import fill, placed
from moefw.models.huggingface.origins import Origin
from moefw.models.huggingface.stored import Description
from moefw.models.huggingface.writing import Written, lay_out
from moefw.runtime.adapters import MergedParameters, begin_adapters
from moefw.runtime.communication.agreement import everywhere, raise_together
from moefw.runtime.finite import all_finite
from moefw.runtime.forward_context import forward_with
from moefw.runtime.layer import MoELayer
from moefw.runtime.naming import initialise_adapters, state_tensors
from moefw.runtime.parallel.gradients import Gradients
from moefw.runtime.parallel.holders import holdings, writes_state
from moefw.system.folders import new_folder
from moefw_kernels.devices import runs_ahead


@frozen(eq=False)
class Source:
    """What a model was read from: its configuration, each parameter's place, and the tensors that it takes."""

    path: Path
    config: Mapping[str, Any]
    origins: Mapping[str, Origin]
    tensors: Mapping[str, Description]


@final
class Pretrained(nn.Module):
    """A model of a Hugging Face folder. ``model(input_ids)`` returns logits; ``module`` is the model that trains.

    In a world of several ranks, all ranks call it equally often, and :meth:`average_gradients` behind a backward.

    ``balances``: whether routers are to be updated after each step of an optimizer.
    """

    def __init__(self, module: Any, assembly: Assembly, layout: Layout, source: Source, *, balances: bool) -> None:
        super().__init__()
        self.module = module
        self.assembly = assembly
        self.layout = layout
        self.source = source
        routers = {layer.number: layer.router for layer in module.modules() if isinstance(layer, MoELayer)}
        self._steps = RouterSteps(routers, layout, warns=balances)
        self._losses: Sequence[Tensor] = ()
        self._routes = RoutesOfText(module, assembly, layout)
        self._num_ids: int = assembly.resolved()["model"]["vocab_size"]

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        documents: Tensor | None = None,
        routes: Tensor | None = None,
    ) -> Tensor:
        """Logits ``(B, S, V)`` of ids ``(B, S)``, int64. ``attention_mask``: 1 for tokens, 0 for padding.

        Tokens see no padding, on whichever side it is; logits of padding mean nothing. ``documents`` ``(B, S)``, int64:
        the number, from 0 on, of each token's document, within which it attends; None: a sequence is one. In training,
        the auxiliary losses of routers wait for :meth:`losses`; a forward that finds some that nobody has taken warns.
        Random draws, such as dropout of adapters, then start from PyTorch's generator of the device.

        ``routes`` ``(B, S, L, K)``, integers: the experts that each token goes to, in each of the L layers with experts
        or in each layer, of which those without experts are not read. -1 throughout: the router chooses. Weights come
        from the scores of now, so gradients reach routers; see :meth:`route_differences`.

        Ranks of cp and tp take the same sequences, and each gets all logits; ranks of dp take sequences of their own.
        Raises ContractError for tensors of another shape, for ids on the CPU that the model does not know, and for
        routes that no router could choose.
        """
        return self._read(self.module.logits, self._batch(input_ids, input_ids, attention_mask, documents, routes))

    def log_probs(
        self,
        input_ids: Tensor,
        labels: Tensor,
        attention_mask: Tensor | None = None,
        documents: Tensor | None = None,
        routes: Tensor | None = None,
    ) -> Tensor:
        """Log-probability ``(B, S)``, fp32, of each of ``labels`` ``(B, S)``, int64, as the token behind those before.

        That at position s is ``log p(labels[:, s] | input_ids[:, : s + 1])``: of a text, hand over ``text[:, :-1]`` and
        ``text[:, 1:]``. It is 0 where the label is -100, and of padding. The last token of a document has no label in
        its document. Gradients are those of ``log_softmax`` of the logits, of which a rank holds at most
        ``model.loss_chunk`` rows, by default 1024, and computes them again in backward.

        The rest is as in :meth:`forward`. Raises ContractError for labels of another shape, or that are no ids.
        """
        if labels.shape != input_ids.shape or labels.dtype != torch.int64:
            what = f"labels are {tuple(labels.shape)} {labels.dtype}, and ids {tuple(input_ids.shape)}."
            raise ContractError(what, "Hand over one label in int64 for each id.")
        outside = (labels >= self.module.options.vocab_size) | ((labels < 0) & (labels != IGNORED))
        if outside.any():
            what = f"{int(labels[outside][0])} is a label and no id of a token."
            raise ContractError(what, f"Use {IGNORED} where no log-probability is wanted.")
        return self._read(self.module.log_probs, self._batch(input_ids, labels, attention_mask, documents, routes))

    def _batch(
        self,
        ids: Tensor,
        labels: Tensor,
        attention_mask: Tensor | None,
        documents: Tensor | None,
        routes: Tensor | None,
    ) -> Batch:
        self._require(ids, attention_mask=attention_mask, documents=documents)
        mask = None if attention_mask is None else attention_mask.bool()
        if mask is not None:
            documents = mask.long() if documents is None else documents.masked_fill(~mask, -1)
        trains = self._trains
        return Batch(
            ids_BS=ids,
            labels_BS=labels,
            mask_BS=mask,
            documents_BS=documents,
            loss_scale=mean_scale(ids, mask) if trains else None,
            seeds_B=self._seeds(ids) if trains else None,
            routes=None if routes is None else self._routes.own(routes, ids, mask),
            dropless=True,
        )

    def _require(self, ids: Tensor, **beside: Tensor | None) -> None:
        """Raise ContractError for ids that are none of the model, and for what lies beside them in another shape."""
        if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.dtype not in (torch.int32, torch.int64):
            what = f"{tuple(ids.shape)} {ids.dtype}" if isinstance(ids, Tensor) else f"a {type(ids).__name__}"
            raise ContractError(f"input_ids are {what}.", "Hand over a tensor (B, S) of torch.int64.")
        for name, tensor in beside.items():
            if tensor is not None and tensor.shape != ids.shape:
                what = f"{name} is {tuple(tensor.shape)}, and input_ids are {tuple(ids.shape)}."
                raise ContractError(what, "Hand over one value for each id.")
        if ids.numel() and not runs_ahead(ids.device):  # of a GPU, the host would wait
            least, most = int(ids.min()), int(ids.max())
            if least < 0 or most >= self._num_ids:
                what = f"input_ids go from {least} to {most}, and the model knows those from 0 to {self._num_ids - 1}."
                raise ContractError(what, "Encode text with the tokenizer of the model's folder.")

    @property
    def _trains(self) -> bool:
        return self.training and torch.is_grad_enabled()

    def _read(self, read: Callable[[Batch], tuple[Tensor, Mapping[int, LayerStats]]], batch: Batch) -> Tensor:
        """What ``read`` returns of the tokens of a batch. In training, its losses and statistics are kept."""
        losses: list[Tensor] = []
        with forward_with(aux_losses=losses):
            values, layers = read(batch)
        self._routes.seen(batch.ids_BS.shape, layers)
        if self._trains:
            if self._losses:
                what = "Routers have auxiliary losses, and nobody has taken those of the forward before."
                warnings.warn(f"{what} Add losses() to the loss, or leave balance out.", stacklevel=3)
            self._losses = tuple(losses)  # a region that runs again in backward adds to the list
            self._steps.add(layers)
        return values

    def routes(self) -> Tensor:
        """Experts that the tokens of the last forward chose, ``(B, S, L, K)`` int16 on the host, for another forward.

        In each of the L layers with experts, in their order, before a capacity dropped any; -1 for padding. Each rank
        gets those of its sequences. Collective. Raises ContractError before a forward.
        """
        return self._routes.chosen()

    def route_differences(self) -> Mapping[int, tuple[int, int]]:
        """How many given choices of each layer its router would not have made, and how many were given.

        Of all forwards with ``routes`` since the last call, and of all ranks. A choice is an expert of a token; their
        order does not count. Padding and tokens without routes are not counted. Collective.
        """
        return self._routes.differences()

    def _seeds(self, input_ids: Tensor) -> Tensor:
        """Seeds of sequences, ``(B)``: the same on ranks that share them."""
        seeds_B = torch.randint(2**62, input_ids.shape[:1], device=input_ids.device)
        sharing = self.layout.group("cp", "tp")
        if sharing is not None:
            dist.broadcast(seeds_B, group=sharing, group_src=0)
        return seeds_B

    def losses(self) -> Tensor:
        """Sum of the auxiliary losses of the last forward in training, each ``coefficient * mean over its tokens``.

        Add it to a loss that is a mean over these tokens. Ranks of cp and tp, which share tokens, have different sums,
        whose mean is the sum of all: see :meth:`average_gradients`. 0 if there are no such losses.
        """
        zero = torch.zeros((), device=next(self.module.parameters()).device)
        total = sum(self._losses, zero).float()
        self._losses = ()
        return total * self.layout.size("cp", "tp")

    def average_gradients(self) -> None:
        """Average each parameter's gradient over all ranks, as DDP does. Collective over all ranks.

        Each ``grad`` is then the gradient of the mean of all ranks' losses, under any layout but stages of a pipeline,
        which do not train here. Call it once, behind the backward passes of a step. A parameter without a gradient gets
        zeros, unless it is frozen.
        """
        Gradients(self.module, self.layout).average()

    def update(self) -> None:
        """Advance the state of the routers, such as an expert bias, by the forwards in training since the last update.

        Call it after each step of an optimizer, unless the bias is to stay. Collective. Raises ContractError before a
        forward in training.
        """
        self._steps.update()

    def __reduce_ex__(self, protocol: Any) -> Never:
        """Raise ContractError: process groups and functions of this process are no data."""
        fix = "Use moefw.save_pretrained(model, FOLDER), or save model.state_dict()."
        raise ContractError("a model of from_pretrained cannot be pickled, as torch.save(model) does.", fix)

    def __deepcopy__(self, memo: Any) -> Never:
        """Raise ContractError: regions under a memory policy would go on to use the original's weights."""
        fix = "Call from_pretrained a second time, and use load_state_dict()."
        raise ContractError("a model of from_pretrained cannot be copied.", fix)


def from_pretrained(path: str | Path, *, device: Device = "cpu", **sections: Mapping[str, Any]) -> Pretrained:
    """Model in a Hugging Face folder, in training mode. Collective in an initialised world.

    ``sections``: those of a spec, such as ``precision={"use": "bf16"}`` or ``parallel={"experts": {"ep": 8}}``.
    Parameters are fp32; FP8, MXFP4 and NVFP4 are read as bf16. With ``adapter={"use": "lora"}`` these are frozen, and
    held in the dtype of the folder, or with ``train={"frozen_weights": "as_stored"}`` as its codes, and new adapters
    train beside them; ``train={"freeze": [...]}`` freezes some alone. Each rank reads its own experts.

    Raises SpecError for a configuration that is not supported, codes that a rank cannot hold, or patterns that name
    nothing, PlanError for sections that do not fit, and CheckpointError for tensors that are damaged, not finite,
    missing, left over or of another shape. A model that cannot be trained may still compute: a router whose weights are
    always 1 (top-1, normalised) gets no gradient from them, here as in ``transformers``.
    """
    root = Path(path)
    if not root.is_dir():
        fix = "Name a folder with a config.json and safetensors files."
        raise SpecError(f"{root} is no folder.", f"{fix} hf download NAME --local-dir DIR fetches one from the hub.")
    model = {"preset": str(root / "config.json"), **sections.get("model", {})}
    place = device_here(device)
    train = {"weights": str(root), **sections.get("train", {})}
    tree: Tree = {"run": {"device": place.type}, **sections, "model": model, "train": train}
    world = dist.get_world_size() if dist.is_initialized() else 1
    assembly = assemble_tree(tree, Marks("from_pretrained"), defaults=defaults(), world=world, trains=False)
    layout = open_layout(assembly, place.type)
    module = build_model(assembly, layout, place, Shared())
    useless = useless_patterns(module, assembly.frozen, layout.host_group())
    if useless:
        raise SpecError(useless)
    initialise_adapters(module, seed=assembly.spec.run.seed)
    source = read_weights(module, root, assembly, layout.host_group())
    return Pretrained(module, assembly, layout, source, balances="routing" in sections)


def read_weights(
    module: nn.Module, path: Path, assembly: Assembly, group: ProcessGroup | None, *, frozen_alone: bool = False
) -> Source:
    """Fill a model with the weights of a Hugging Face folder, or its frozen ones alone. Collective over ``group``.

    Raises SpecError or CheckpointError on every rank, before any change; or CheckpointError with all tensors that hold
    NaN or infinity, which are found as they are read.
    """
    error = None
    folder = None
    source = None
    try:
        config = read_config(path)
        folder = Folder(path)
        rules = family_of(config, path).rules
        origins, taken = placed(module, folder, rules, num_experts=assembly.site.dims.num_experts)
        tensors = {name: (folder.tensors[name].dtype, folder.tensors[name].shape) for name in taken}
        source = Source(path, config, origins, tensors)
    except MoefwError as problem:
        error = problem
    raise_together(error, group)
    assert folder is not None
    assert source is not None
    fill(module, folder, source.origins, group, frozen_alone=frozen_alone)
    if not frozen_alone:
        begin_adapters(module)
        read_adapter(module, assembly, group)
    return source


def save_pretrained(model: Pretrained, path: str | Path) -> None:
    """Write a folder that ``transformers`` loads: each tensor as it was named, with its dtype. Collective.

    What was FP8, MXFP4 or NVFP4 is written as bf16. Adapters are merged into their weights. The tokenizer's files are
    handed on. Raises CheckpointError on every rank if the folder is there and holds something, if one rank cannot
    write, or with all parameters that hold NaN or infinity. The folder appears whole or not at all.
    """
    leads = model.layout.rank == 0
    source = model.source
    with ExitStack() as opened:

        def begin() -> str:
            return str(opened.enter_context(_begun(Path(path), source))) if leads else ""

        folder = everywhere(_together(begin, path, model.layout), model.layout.host_group())[0]
        written = _together(lambda: Written.opened(Path(folder)), path, model.layout)
        with torch.no_grad(), all_finite("the model", _useless, model.layout.host_group()) as looked_at:
            for name, tensor in _owned(model):
                origin = source.origins[name]
                looked_at(name, origin.of(written.tensors[origin.name]).copy_(tensor))
        _together(written.flush, path, model.layout)
        _together(opened.close, path, model.layout)


def _useless(what: str) -> CheckpointError:
    return CheckpointError(what, "Go back to where it was finite.")


@contextmanager
def _begun(path: Path, source: Source) -> Iterator[Path]:
    """Yield a folder that holds all but the values, and that gets the name ``path`` in the end."""
    with new_folder(path) as folder:
        lay_out(folder, source.tensors)
        config = {key: value for key, value in source.config.items() if key != "quantization_config"}
        (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        for name in HANDED_ON:
            hand_on(source.path / name, folder / name)
        yield folder


def _together(act: Callable[[], Any], path: str | Path, layout: Layout) -> Any:
    """Result of ``act``, which writes to ``path``. If it fails on one rank, raise its error on all ranks.

    Collective: no rank goes on before all have acted.
    """
    answer: Any = None
    problem: MoefwError | None = None
    try:
        answer = act()
    except MoefwError as error:
        problem = error
    except OSError as error:
        what = f"{path} cannot be written on rank {layout.rank}: {os_reason(error)}."
        problem = CheckpointError(what, "Name a folder that every rank can write.")
    raise_together(problem, layout.host_group())
    return answer


def _owned(model: Pretrained) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that this rank writes, whole: the first of the ranks that hold copies. Collective."""
    layout = model.layout
    module = model.module
    merged = MergedParameters(module)
    for holding in holdings(module):
        if not holding.pieces[0].of_adapter:
            yield from holding.written(merged.of(holding.pieces), layout)
    if writes_state("dense", layout):
        yield from ((name, state) for name, state in state_tensors(module).items() if name in model.source.origins)
