"""Routes from outside: routers replay them and say how far they would differ; the rest is computed as ever."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import moefw
from hf_models import MODELS, SIZES, VOCABULARY, model_of, theirs
from moefw.core.errors import ContractError
from moefw.testing.pool import RankPool

IDS = torch.randint(VOCABULARY, (4, 14), generator=torch.Generator().manual_seed(0))
LABELS = IDS.roll(-1, 1)
TRAIN = {"tokens_per_step": 64, "micro_batch": 1, "seq_len": 16}
MASK = torch.ones_like(IDS)
MASK[1, 9:] = 0
LAYOUTS: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "dp 2, ep 2": (2, {"experts": {"ep": 2}}),
    "tp 2, ep 2": (2, {"dense": {"tp": 2}, "experts": {"ep": 2}}),
    "cp 2": (2, {"dense": {"cp": 2}}),
    "tp 2, cp 2, sharded": (4, {"dense": {"tp": 2, "cp": 2, "shard": "all"}, "experts": {"ep": 2, "shard": "all"}}),
    "pp 2": (2, {"pp": 2}),
}


def drawn(layers: int, seed: int = 0) -> Tensor:
    """Two different experts of eight for each token and layer."""
    scores = torch.rand(*IDS.shape, layers, 8, generator=torch.Generator().manual_seed(seed))
    return scores.topk(2).indices.to(torch.int16)


def gradients(model: moefw.Pretrained) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


ROUTINGS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "softmax": ("qwen3_moe", {}),
    "softmax with losses": ("qwen3_moe", {"balance": [{"kind": "aux_loss"}, {"kind": "z_loss"}]}),
    "a bias": ("gpt_oss", {}),
    "sigmoid in groups, with a bias": ("deepseek_v3", {}),
    "jitter": ("qwen3_moe", {"jitter": 0.3}),
    "capacity": ("qwen3_moe", {"capacity": {"factor": 0.5}}),
    "sinkhorn": ("qwen3_moe", {"use": "sinkhorn"}),
    "forced": ("qwen3_moe", {"use": "forced"}),
}


@pytest.mark.parametrize("memory", [[], [{"use": "recompute", "regions": ["layer"]}]], ids=["kept", "recomputed"])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_a_routers_own_routes_change_no_bit_and_differ_nowhere(routing: str, memory: Any, tmp_path: Path) -> None:
    family, options = ROUTINGS[routing]
    model_of(family).save_pretrained(tmp_path)
    found = []
    routes = None
    for _ in range(2):
        model = moefw.from_pretrained(tmp_path, memory=memory, **({"routing": options} if options else {}))
        torch.manual_seed(0)
        values = model.log_probs(IDS, LABELS, MASK, routes=routes)
        losses = model.losses()
        (values.square().mean() + losses).backward()
        found.append([values.detach(), losses.detach(), *gradients(model)])
        routes = model.routes()
    assert all(map(torch.equal, *found))
    differences = model.route_differences()
    assert [*differences.values()] == [(0, 2 * int(MASK.sum()))] * routes.shape[2]
    assert set(model.route_differences().values()) == {(0, 0)}
    assert (routes[MASK == 0] == -1).all()


def forced_to(oracle: Any, routes: Tensor) -> None:
    """Let the routers of transformers take given experts, with weights of their own scores."""
    gates = [layer.mlp.gate for layer in oracle.model.layers if hasattr(layer.mlp, "gate")]
    for number, gate in enumerate(gates):
        gate.forward = _forced(gate.weight, routes[:, :, number].flatten(0, 1).long(), oracle.config)


def _forced(weight: Tensor, ids_TK: Tensor, config: Any) -> Any:
    is_sigmoid = config.model_type == "deepseek_v3"

    def forward(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits_TE = torch.nn.functional.linear(hidden.flatten(0, -2), weight)
        scores_TE = logits_TE.sigmoid() if is_sigmoid else logits_TE.softmax(-1)
        weights_TK = scores_TE.gather(1, ids_TK)
        if config.norm_topk_prob:
            weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        return logits_TE, weights_TK * (config.routed_scaling_factor if is_sigmoid else 1.0), ids_TK

    return forward


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_experts_are_the_given_ones_and_weights_of_the_scores_of_now(
    family: str, normalised: bool, tmp_path: Path
) -> None:
    """R3 (arXiv 2510.11370, equation 6): values and gradients of a model whose routers are told what to choose."""
    oracle = theirs(family, {**SIZES, **MODELS[family], "norm_topk_prob": normalised})
    oracle.save_pretrained(tmp_path, save_original_format=False)
    model = moefw.from_pretrained(tmp_path)
    routes = drawn(2 - (family == "deepseek_v3"))
    values = model.log_probs(IDS, LABELS, routes=routes)
    assert torch.equal(model.routes(), routes)
    values.square().mean().backward()
    forced_to(oracle, routes)
    logits = oracle(input_ids=IDS).logits
    wanted = logits.log_softmax(-1).gather(-1, LABELS.unsqueeze(-1)).squeeze(-1)
    assert (values - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    wanted.square().mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    ours = dict(moefw.stream_pretrained(model))
    for name, parameter in oracle.named_parameters():
        assert (ours[name] - parameter.grad).norm() <= 1e-4 * parameter.grad.norm(), name


def test_where_a_token_has_none_its_router_chooses(tmp_path: Path) -> None:
    model_of("qwen3_moe").save_pretrained(tmp_path)
    model = moefw.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        model(IDS)
        free = model.routes()
        routes = drawn(2)
        routes[:, :5] = -1
        model(IDS, MASK, routes=routes)
        assert torch.equal(model.routes()[:, 5:][MASK[:, 5:] == 1], routes[:, 5:][MASK[:, 5:] == 1])
        assert torch.equal(model.routes()[:, :5, 0], free[:, :5, 0])
        differing = (routes[:, 5:, 0, :, None] != free[:, 5:, 0, None, :]).all(-1)[MASK[:, 5:] == 1].sum()
        counts = model.route_differences()
        assert counts[0] == (differing, 2 * int(MASK[:, 5:].sum()))
        absent = model(IDS, routes=torch.full_like(routes, -1))
        assert torch.equal(absent, model(IDS))
    assert [*model.route_differences().values()] == [(0, 0)] * 2


def test_layers_without_experts_are_not_read(tmp_path: Path) -> None:
    """Other engines give all layers, with zeros for those that have no experts."""
    model_of("deepseek_v3").save_pretrained(tmp_path)
    model = moefw.from_pretrained(tmp_path).eval()
    routes = drawn(1)
    of_all = torch.cat([torch.zeros_like(routes), routes], 2).to(torch.uint8)
    assert torch.equal(model(IDS, routes=of_all), model(IDS, routes=routes))


def replayed(folder: Path, parallel: Mapping[str, Any]) -> tuple[Tensor, Tensor, Any, int]:
    model = moefw.from_pretrained(folder, parallel=parallel, train=TRAIN | {"tokens_per_step": 128}).eval()
    index, size = model.layout.index("dp"), model.layout.size("dp")
    routes = drawn(2)
    routes[:, :3] = -1
    ids, labels, mask, routes = (each.chunk(size)[index] for each in (IDS, LABELS, MASK, routes))
    with torch.no_grad():
        values = model.log_probs(ids, labels, mask, routes=routes)
    return values, model.routes(), model.route_differences(), index


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_replays_and_counts_the_same(pool: RankPool, layout: str, tmp_path: Path) -> None:
    """Also of a length that ranks of cp and tp do not divide."""
    world, parallel = LAYOUTS[layout]
    model_of("qwen3_moe").save_pretrained(tmp_path)
    values, routes, differences, _ = replayed(tmp_path, {})
    assert all(0 < differing < given for differing, given in differences.values())
    parts = 2 if "dp 2" in layout else 1
    for own, chosen, counted, index in pool.run(replayed, world, tmp_path, parallel):
        torch.testing.assert_close(own, values.chunk(parts)[index], rtol=1e-5, atol=1e-5)
        assert torch.equal(chosen, routes.chunk(parts)[index])
        assert counted == differences


WRONG = {
    "shape": (drawn(2)[:, 1:], r"routes are \(4, 13, 2, 2\) torch\.int16, and not \(4, 14, 2, 2\) of an integer dtype"),
    "layers": (drawn(3), r"routes are \(4, 14, 3, 2\)"),
    "dtype": (drawn(2).float(), r"routes are \(4, 14, 2, 2\) torch\.float32"),
    "range": (
        drawn(2).index_fill(1, torch.tensor(3), 8),
        r"layer 0: sequence 0, position 3 has an id outside of the 8",
    ),
    "twice": (
        drawn(2).index_fill(2, torch.tensor(1), 4),
        r"layer 1: sequence 0, position 0 has an expert twice: \[4, 4\]",
    ),
    "part": (drawn(2).index_fill(3, torch.tensor(1), -1), r"has some experts and not all: \[\d, -1\]\. Give distinct"),
}


@pytest.mark.parametrize("what", WRONG)
def test_routes_that_no_router_could_choose_are_refused(what: str, tmp_path: Path) -> None:
    routes, says = WRONG[what]
    model_of("qwen3_moe").save_pretrained(tmp_path)
    model = moefw.from_pretrained(tmp_path)
    with pytest.raises(ContractError, match=r"routes\(\) of a model that has read no text"):
        model.routes()
    with pytest.raises(ContractError, match=says):
        model(IDS, routes=routes)
