"""What a step tells of itself: norms of gradients by part of the model, and the entropy of routers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from moefw.compose.assembly import Assembly
from moefw.compose.build import Shared, build_model, open_layout
from moefw.compose.defaults import defaults
from moefw.compose.resolve import assemble_tree
from moefw.compose.spec.source import Marks
from moefw.core.stages import Batch, Routing
from moefw.runtime.layer import MoELayer
from moefw.runtime.naming import initialise
from moefw.runtime.parallel.parts import PARTS
from moefw.runtime.router_entropy import entropy_of_scores
from moefw.testing.training import SMALL
from moefw.training.clock import StepClock
from moefw.training.engine import Engine, StepResult
from moefw.training.step_record import shares

EXPERTS = SMALL["model"]["num_experts"]
NAMES = {"routers": ".router.", "experts": ".experts.", "attention": ".attention."}
"""What the canonical names of the parameters of each part contain."""


def batches(assembly: Assembly) -> list[Batch]:
    """Two micro-batches, whose tokens are masked here and there."""
    generator = torch.Generator().manual_seed(5)
    made = []
    for _ in range(2):
        tokens = torch.randint(61, (2, 17), generator=generator)
        mask_BS = torch.rand((2, 16), generator=generator) < 0.7
        made.append(Batch(ids_BS=tokens[:, :-1], labels_BS=tokens[:, 1:], mask_BS=mask_BS))
    return made


def stepped(
    balance: tuple[dict[str, Any], ...] = (), scores: bool = True
) -> tuple[Any, StepResult, list[tuple[int, Routing, Tensor]]]:
    """A model after a step, its result, and the routings of the step by layer, with the mask of their tokens.

    Without ``scores``, routers do not give them.
    """
    tree = {**SMALL, "routing": {**SMALL["routing"], "balance": [*balance]}}
    assembly = assemble_tree(tree, Marks("step"), defaults=defaults())
    layout = open_layout(assembly, "cpu")
    model: Any = build_model(assembly, layout, torch.device("cpu"), Shared())
    initialise(model, seed=1, std=model.init_std)
    routings: list[tuple[int, Routing, Tensor]] = []

    def seen(number: int, router: Any, arguments: tuple[Tensor, Batch], routing: Routing) -> Routing:
        mask_T = arguments[1].mask_T
        assert mask_T is not None
        routings.append((number, routing, mask_T))
        return routing if scores else replace(routing, scores_TE=None)

    for layer in model.modules():
        if isinstance(layer, MoELayer):
            layer.router.register_forward_hook(partial(seen, layer.number))
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.0), layout, clip_norm=None)
    return model, engine.step(batches(assembly), 0.0, StepClock()), routings


def test_norms_by_part_are_those_of_its_parameters_and_add_up_to_the_whole() -> None:
    model, result, _ = stepped()
    squares = dict.fromkeys(PARTS, 0.0)
    for name, parameter in model.named_parameters():
        part = next((part for part, word in NAMES.items() if word in f".{name}." and "shared" not in name), "rest")
        squares[part] += float(parameter.grad.double().square().sum())
    assert result.grad_norms == pytest.approx({part: square**0.5 for part, square in squares.items()}, rel=1e-6)
    assert all(norm > 0 for norm in result.grad_norms.values())
    assert sum(norm**2 for norm in result.grad_norms.values()) == pytest.approx(result.grad_norm**2, rel=1e-12)


def test_the_entropy_of_routers_is_the_mean_over_the_valid_tokens_of_all_micro_batches() -> None:
    _, result, routings = stepped()
    for layer, entropy in zip(result.layers, result.router_entropy_L, strict=True):
        of_tokens = []
        for number, routing, mask_T in routings:
            if number == layer:
                assert routing.scores_TE is not None
                for scores_E in routing.scores_TE[mask_T].double():
                    share_E = scores_E / scores_E.sum()
                    of_tokens.append(-(share_E * share_E.log()).sum())
        assert entropy == pytest.approx(
            float(torch.stack(of_tokens).mean()) / float(torch.tensor(EXPERTS).log()), rel=1e-5
        )
    assert result.counts == {}, "the entropy is no count"


def test_a_router_that_gives_no_scores_tells_no_entropy() -> None:
    _, result, _ = stepped(scores=False)
    assert result.router_entropy_L == [None, None]


@pytest.mark.parametrize(
    ("scores", "entropy"),
    [
        ([1.0, 1.0, 1.0, 1.0], 1.3862944),
        ([0.3, 0.0, 0.0, 0.0], 0.0),
        ([0.0, 0.0, 0.0, 0.0], 0.0),
        ([2.0, 2.0, 0, 0], 0.6931472),
    ],
)
def test_scores_count_divided_by_their_sum(scores: list[float], entropy: float) -> None:
    scores_TE = torch.tensor([scores, scores])
    assert entropy_of_scores(scores_TE, None).tolist() == pytest.approx([2 * entropy, 2.0])
    assert entropy_of_scores(scores_TE, torch.tensor([False, True])).tolist() == pytest.approx([entropy, 1.0])
    assert entropy_of_scores(scores_TE[:0], None).tolist() == [0.0, 0.0]


def test_the_entropy_of_a_sure_router_has_no_sign_and_that_of_logits_is_not_finite() -> None:
    for mask_T in (None, torch.tensor([True])):
        assert not entropy_of_scores(torch.zeros(1, 4), mask_T).signbit().any()
        assert not entropy_of_scores(torch.tensor([[-1.0, 0.5, 2.0]]), mask_T)[0].isfinite()


def test_each_term_has_its_share_of_the_loss() -> None:
    assert shares(3.0, {"aux_loss": 0.75, "z_loss": 0.25}) == {"aux_loss": 0.1875, "z_loss": 0.0625}
    _, result, _ = stepped(({"kind": "aux_loss", "coeff": 0.1}, {"kind": "z_loss", "coeff": 0.1}))
    told = shares(result.loss, result.aux_losses)
    assert told.keys() == {"aux_loss", "z_loss"}
    assert all(0 < share < 1 for share in told.values())
