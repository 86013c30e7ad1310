"""MoE layers of ours in the place of the MoE blocks of a model of ``transformers``, with the blocks' weights."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Unpack, final

import torch
from torch import Tensor, nn

from moefw.compose.assembly import Assembly
from moefw.compose.block_weights import Place, Saving, take_over
from moefw.compose.devices import device_here
from moefw.compose.library import Layer, LayerOutput, Sections, assemble_layers, build_layers
from moefw.compose.spec.sections import over
from moefw.core.errors import ContractError, Problem, SpecError
from moefw.models.huggingface.blocks import Block, blocks_of, problems_of
from moefw.models.huggingface.written import ROUTER, computed_routing


@final
class ReplacedBlock(nn.Module):
    """A layer that is called as the block was. Its model has no way out for losses, so it holds them until asked."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer = layer
        self.losses: Tensor | None = None
        self.balances = False
        """Whether the last forward made auxiliary losses."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Output for ``(B, S, D)``, of all tokens: a block is told of no padding."""
        output: LayerOutput = self.layer(hidden_states)
        self.losses = output.losses if self.training else None
        self.balances = bool(output.stats.aux_losses)
        return output.out


@final
class ReplacedBlocks:
    """The layers in a model, all of which act together."""

    def __init__(self, blocks: list[ReplacedBlock], saving: Saving) -> None:
        self._blocks = blocks
        self._saving = saving

    @property
    def layers(self) -> list[Layer]:
        """The layers, in the order of the model."""
        return [block.layer for block in self._blocks]

    def losses(self) -> Tensor:
        """Sum of the auxiliary losses of the last forward in training; see :class:`moefw.LayerOutput`.

        Warns of losses without a gradient. Raises ContractError if there was no such forward since the last call.
        """
        losses = [block.losses for block in self._blocks if block.losses is not None]
        if len(losses) < len(self._blocks):
            raise ContractError("losses() without a forward in training before it.", "Call the model first.")
        for block in self._blocks:
            block.losses = None
        total = torch.stack(losses).sum()
        if torch.is_grad_enabled() and not total.requires_grad and any(block.balances for block in self._blocks):
            what = "losses() has no gradient, as the forward before it kept no graph, so it balances nothing."
            warnings.warn(f"{what} Under gradient checkpointing, choose use_reentrant=False.", stacklevel=2)
        return total

    def update(self) -> None:
        """Advance the state of the routers: see :meth:`moefw.Layer.update`."""
        for layer in self.layers:
            layer.update()

    def average_gradients(self) -> None:
        """Average the gradients of the layers over all ranks: see :meth:`moefw.Layer.average_gradients`."""
        for layer in self.layers:
            layer.average_gradients()

    def save_pretrained(self, path: str | Path, **options: Any) -> None:
        """Write the model as the folder that it would be with its blocks, which ``transformers`` loads. Collective.

        Rank 0 writes. On one rank that has all experts, ``model.save_pretrained`` does the same. Weights get the dtype
        that those of the block had. ``options``: those of ``transformers``, such as ``max_shard_size``.

        Raises SpecError where the blocks would compute something else with these weights, as beside an expert bias, and
        CheckpointError on every rank if ``path`` cannot be written.
        """
        self._saving.together(path, **options)

    def close(self) -> None:
        """Free what exists once in the process: see :meth:`moefw.Layer.close`."""
        for layer in self.layers:
            layer.close()


def replace_moe(model: nn.Module, **sections: Unpack[Sections]) -> ReplacedBlocks:
    """Put MoE layers in the place of the MoE blocks of a model of ``transformers``, and take their weights over.

    The layers compute what the blocks did, under the ``sections`` of a spec, as :func:`moefw.build_layer` takes them.
    Options of ``routing`` go over those of the model. Blocks are replaced one after another, and the old ones freed.
    Parameters are fp32; those of weights that do not train (``requires_grad``) do not either.
    Collective in an initialised world, in which every rank has the whole model.

    Raises SpecError, PluginError or PlanError with every problem, before anything is replaced: for models other than
    Mixtral, OLMoE and Qwen3-MoE, and for the model's own auxiliary loss, ``output_router_logits``, whose routers go.
    """
    blocks = blocks_of(model)
    problems = list(problems_of(model, blocks))
    if problems:
        raise SpecError(problems)
    _refuse_router_logits(model, (), {})
    routing: Any = over({"routing": dict(blocks[0].routing)}, {"routing": sections.get("routing", {})})["routing"]
    sizes = {**blocks[0].sizes, "num_layers": len(blocks)}
    device = device_here(blocks[0].device)
    assembly = assemble_layers("replace_moe()", sizes, {**sections, "routing": routing}, device)
    differing = _differences(assembly, blocks[0])
    model.register_forward_pre_hook(_refuse_router_logits, with_kwargs=True)
    replaced = []
    places = []
    for layer in build_layers(assembly, device):
        block = blocks.pop(0)  # no reference to it stays, so its weights are free before the next layer is built
        take_over(layer, block)
        places.append(Place.of(layer, block))
        replaced.append(ReplacedBlock(layer).train(block.module.training))
        block.replace(replaced[-1])
    return ReplacedBlocks(replaced, Saving(model, places, differing))


def _differences(assembly: Assembly, block: Block) -> list[Problem]:
    """Why blocks of ``transformers`` would not compute what layers do with the same weights."""
    found = assembly.resolved()["routing"]
    kind = type(block.module).__name__
    fix = "Keep model.state_dict(), which a model with the same layers loads."
    if found["use"] != ROUTER:
        return [Problem(f"{kind} does not route like {found['use']}, so save_pretrained() has no layout for it.", fix)]
    wanted = assemble_layers("replace_moe()", block.sizes, {"routing": block.routing}, torch.device("cpu")).resolved()
    computed = computed_routing(wanted["routing"])
    return [
        Problem(f"routing.{name} {value!r} is not what {kind} computes ({computed[name]!r}).", fix)
        for name, value in computed_routing(found).items()
        if value != computed[name]
    ]


def _refuse_router_logits(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise SpecError if the model is asked for the logits of routers, of which it makes a loss."""
    config: Any = model.config
    asked = kwargs.get("output_router_logits")
    if config.output_router_logits if asked is None else asked:
        what = "output_router_logits reads the routers of blocks that are replaced, so its loss would be 0."
        fix = "Set it to False, give replace_moe a routing with balance, and add losses() to the loss."
        raise SpecError(what, fix)
