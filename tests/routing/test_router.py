"""The router: effective balance, auxiliary losses that count once, and masked tokens."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moefw.compose.build import Shared, build_model, open_layout
from moefw.compose.defaults import defaults
from moefw.compose.machine import lone_site
from moefw.compose.resolve import assemble_tree
from moefw.compose.spec.source import Marks
from moefw.core.site import Dims, Machine
from moefw.core.stages import Batch
from moefw.plugins.routers.topk import TopK
from moefw.plugins.routers.topk.options import Balance
from moefw.plugins.routers.topk.router import TopKRouter
from moefw.runtime.naming import canonical_parameters, initialise
from moefw.testing.suites.runs import global_batch, open_model, whole_model
from moefw.testing.training import SMALL
from moefw.training.engine import Engine

SITE = lone_site(Dims(model_dim=4, expert_dim=8, num_experts=6, top_k=2), Machine(), layer=1)


def router(**options) -> TopKRouter:
    made = TopKRouter(SITE, TopK(**options))
    torch.nn.init.normal_(made.weight, generator=torch.Generator().manual_seed(0))
    return made


def batch_of(x_TD: Tensor, mask: list[bool] | None = None, scale: float | None = None) -> Batch:
    ids = torch.zeros(1, len(x_TD), dtype=torch.int64)
    mask_BS = None if mask is None else torch.tensor([mask])
    return Batch(ids_BS=ids, labels_BS=ids, mask_BS=mask_BS, loss_scale=None if scale is None else torch.tensor(scale))


def model_gradients(regions: list[str], coeff: float) -> dict[str, Tensor]:
    """Gradients of a whole transformer whose language-model loss is switched off, so that only the aux loss remains."""
    tree = {
        **SMALL,
        "routing": {"use": "topk", "score": "softmax", "balance": [{"kind": "aux_loss", "coeff": coeff}]},
        "memory": [{"use": "recompute", "regions": regions}] if regions else [],
    }
    assembly = assemble_tree(tree, Marks("test"), defaults=defaults(), machine=Machine())
    layout = open_layout(assembly, "cpu")
    model = build_model(assembly, layout, torch.device("cpu"), Shared())
    initialise(model, seed=1, std=lambda name: None if "norm" in name else 0.5)
    tokens = torch.randint(61, (2, 17), generator=torch.Generator().manual_seed(0))
    batch = Batch(ids_BS=tokens[:, :-1], labels_BS=tokens[:, 1:], loss_scale=torch.tensor(1 / 32))
    output = model(batch)
    assert sorted(output.layers) == [1, 2]
    (output.loss_sum * 0.0).backward()
    return {p.name: p.of(p.parameter.grad) for p in canonical_parameters(model) if p.parameter.grad is not None}


@pytest.mark.parametrize("regions", [[], ["router"], ["layer"]])
def test_the_aux_loss_reaches_the_router_of_every_layer_once(regions: list[str]) -> None:
    once, thrice = model_gradients(regions, 0.01), model_gradients(regions, 0.03)
    plain = model_gradients([], 0.01)
    for layer in (1, 2):
        name = f"layers.{layer}.moe.router.weight"
        assert once[name].abs().max() > 1e-6
        torch.testing.assert_close(once[name], plain[name], rtol=1e-5, atol=1e-9)
        torch.testing.assert_close(thrice[name], 3 * once[name], rtol=1e-4, atol=1e-8)


def test_an_aux_loss_with_a_coefficient_of_zero_moves_no_router() -> None:
    silent = model_gradients([], 0.0)
    assert silent["layers.1.moe.router.weight"].abs().max() == 0


def test_uniform_routing_has_an_aux_loss_of_exactly_its_coefficient() -> None:
    made = router(score="softmax", balance=(Balance(kind="aux_loss", coeff=0.3),))
    with torch.no_grad():
        made.weight.copy_(torch.cat([torch.eye(4), -torch.eye(4)[:2]]) * 0)
    routing = made(torch.randn(12, 4), batch_of(torch.zeros(12, 4)))
    assert routing.aux_losses["aux_loss"].item() / 12 == pytest.approx(0.3, rel=1e-5)


def test_losses_are_not_attached_outside_training() -> None:
    made = router(score="softmax", balance=(Balance(kind="z_loss", coeff=1.0),)).eval()
    x_TD = torch.randn(5, 4)
    made(x_TD, batch_of(x_TD, scale=1.0)).weights_TK.sum().backward()
    assert made.weight.grad is not None
    assert made.weight.grad.abs().max() < 1e-6


def test_the_bias_rises_for_idle_experts_and_falls_for_busy_ones() -> None:
    made = router(score="sigmoid", balance=(Balance(kind="expert_bias", rate=0.5),))
    made.update({"tokens_per_expert": torch.tensor([0.0, 4.0, 2.0, 2.0, 2.0, 2.0])})
    assert made.expert_bias.tolist() == [0.5, -0.5, 0.0, 0.0, 0.0, 0.0]


def test_the_bias_changes_who_is_chosen_and_not_the_weights() -> None:
    made = router(score="sigmoid", renormalise=False, balance=(Balance(kind="expert_bias"),))
    x_TD = torch.randn(8, 4)
    made.expert_bias[3] = 10.0
    routing = made(x_TD, batch_of(x_TD))
    assert (routing.expert_ids_TK == 3).any(1).all()
    torch.testing.assert_close(routing.weights_TK, routing.scores_TE.gather(1, routing.expert_ids_TK))


def test_forward_writes_no_state() -> None:
    made = router(score="sigmoid", balance=(Balance(kind="expert_bias"),))
    before = {name: tensor.clone() for name, tensor in made.state_dict(keep_vars=True).items()}
    made(torch.randn(8, 4), batch_of(torch.zeros(8, 4), scale=1.0))
    assert made.expert_bias.abs().max() == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in made.state_dict().items())


def test_masked_tokens_go_nowhere_and_count_nowhere() -> None:
    made = router(score="sigmoid", balance=(Balance(kind="z_loss", coeff=1.0), Balance(kind="aux_loss", coeff=1.0)))
    x_TD = torch.randn(4, 4)
    masked = made(x_TD, batch_of(x_TD, mask=[True, False, True, False]))
    short = made(x_TD[::2], batch_of(x_TD[::2]))
    assert masked.expert_ids_TK[1].tolist() == [-1, -1]
    assert masked.weights_TK[3].tolist() == [0.0, 0.0]
    assert torch.equal(masked.stats["tokens_per_expert"], short.stats["tokens_per_expert"])
    for name, loss in short.aux_losses.items():
        assert masked.aux_losses[name].item() == pytest.approx(loss.item(), rel=1e-6)


def test_a_rank_without_tokens_routes_nothing() -> None:
    made = router(score="softmax", balance=(Balance(kind="aux_loss"), Balance(kind="z_loss")))
    routing = made(torch.zeros(0, 4), batch_of(torch.zeros(0, 4), scale=1.0))
    assert routing.stats["tokens_per_expert"].tolist() == [0.0] * 6
    assert all(loss.item() == 0.0 for loss in routing.aux_losses.values())


def test_statistics_reach_the_router_of_their_layer_in_whatever_order_a_model_reports_them() -> None:
    rule = {"use": "topk", "score": "sigmoid", "balance": [{"kind": "expert_bias"}]}
    biases = []
    for order in (list, reversed):
        model, assembly, layout, _ = open_model(whole_model(1, parts={"routing": rule}, plugins=()))
        model.register_forward_hook(
            lambda _, __, output, order=order: replace(output, layers=dict(order(output.layers.items())))
        )
        engine = Engine(model, torch.optim.SGD(model.parameters()), layout, clip_norm=None)
        engine.step(global_batch(assembly, layout, 0), 0.0, lambda *_: nullcontext())
        biases.append([engine.routers[number].expert_bias.tolist() for number in sorted(engine.routers)])
    assert biases[0] == biases[1]
    assert biases[0][0] != biases[0][1]
