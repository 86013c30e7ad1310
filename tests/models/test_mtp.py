"""Multi-token prediction computes what ``transformers``' does, and no token is predicted that is not there."""

from __future__ import annotations

import copy
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from hf_models import VOCABULARY, tensors_of, theirs
from moefw import from_pretrained
from moefw.compose.build import Shared, build_model, open_layout
from moefw.compose.defaults import defaults
from moefw.compose.resolve import assemble_tree
from moefw.compose.spec.source import Marks
from moefw.core.site import Machine
from moefw.core.stages import Batch
from moefw.models.embedding import IGNORED
from moefw.models.mtp import ids_ahead, labels_ahead
from moefw.runtime.naming import canonical_parameters, initialise
from moefw.runtime.phases import straight
from moefw.testing.pool import RankPool
from moefw.testing.training import SMALL, short_run
from pairwise import each_value

SIZES = {
    **{"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "num_experts_per_tok": 3, "initializer_range": 0.2},
    **{"n_routed_experts": 8, "moe_intermediate_size": 16, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1},
    **{"q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5},
}
COEFF, SEQUENCES, POSITIONS = 0.3, 2, 14
LOGITS, LOSS, GRADIENT, FLOOR = 1e-5, 1e-6, 1e-4, 1e-6


def their_mtp(main: Any, layers: int) -> Any:
    from transformers.modeling_layers import MtpModel

    main.config = copy.deepcopy(main.config)
    main.config.num_mtp_layers = layers
    model = MtpModel(main, layers)
    model.config._attn_implementation = "eager"
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in [*model.layers.named_parameters(), *model.layers.named_buffers()]:
            tensor.normal_(1.0 if "norm" in name else 0.0, 0.2, generator=generator)
    return model.train()


def their_logits(main: Any, mtp: Any, ids: Tensor) -> list[Tensor]:
    """Return the logits of the next token and of those behind it; ``ids`` holds one token more than positions."""
    from transformers.cache_utils import DynamicCache

    hidden = main.model(input_ids=ids[:, :-1]).last_hidden_state
    found, following = [main.lm_head(hidden)], ids[:, 1:]
    places = torch.arange(ids.shape[1] - 1).unsqueeze(0)
    for depth in range(mtp.num_mtp_layers):
        hidden = mtp.forward_layer(depth, hidden, places, DynamicCache(), input_ids=following)
        found.append(mtp.shared_head(hidden))
        following = torch.nn.functional.pad(following[:, 1:], (0, 1))
    return found


def save(main: Any, mtp: Any, folder: Path, *, grads: bool = False) -> None:
    """Save the weights, or the gradients, of both models as the hub has them: MTP layers behind all others."""

    def value(tensor: Tensor) -> Tensor:
        return tensor if not grads else torch.zeros_like(tensor) if tensor.grad is None else tensor.grad

    config, layers = copy.deepcopy(main.config), main.config.num_hidden_layers
    config.num_hidden_layers += mtp.num_mtp_layers
    whole, own = type(main)(config), {}
    with torch.no_grad():
        into = {**dict(whole.named_parameters()), **dict(whole.named_buffers())}
        blocks = {f"model.layers.{layers + n}.": layer.mtp_block for n, layer in enumerate(mtp.layers)}
        for prefix, module in {"": main, **blocks}.items():
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
                into[f"{prefix}{name}"].copy_(value(tensor))
        for number, layer in enumerate(mtp.layers, layers):
            for name in ("enorm", "hnorm", "eh_proj"):
                own[f"model.layers.{number}.{name}.weight"] = value(getattr(layer, name).weight).clone()
            own[f"model.layers.{number}.shared_head.norm.weight"] = value(layer.post_norm.weight).clone()
    whole.save_pretrained(folder)
    main.config.save_pretrained(folder)
    save_file(own, folder / "mtp.safetensors")


@pytest.mark.parametrize(("layers", "tied"), each_value([1, 2], [False, True]))
def test_logits_losses_and_gradients_are_those_of_transformers(layers: int, tied: bool) -> None:
    main = theirs("deepseek_v3", {**SIZES, "tie_word_embeddings": tied})
    mtp = their_mtp(main, layers)
    ids = torch.randint(VOCABULARY, (SEQUENCES, POSITIONS + 1), generator=torch.Generator().manual_seed(2))
    batch = Batch(ids_BS=ids[:, :-1], labels_BS=ids[:, 1:], loss_scale=torch.tensor(1.0 / (SEQUENCES * POSITIONS)))
    with tempfile.TemporaryDirectory() as name:
        save(main, mtp, Path(name))
        found = from_pretrained(Path(name), model={"mtp_layers": layers, "mtp_coeff": COEFF})
    model: Any = found.module
    logits = model.predictions(straight(model.phases[:-1])(batch))
    wanted = their_logits(main, mtp, ids)
    for depth, (mine, right) in enumerate(zip(logits, wanted, strict=True)):
        known = slice(0, POSITIONS - max(0, depth - 1))
        off = mine.unflatten(0, (SEQUENCES, POSITIONS))[:, known] - right[:, known]
        assert off.abs().max() <= LOGITS * right.abs().max()
    output = model(batch)
    sums = [
        torch.nn.functional.cross_entropy(
            right[:, : POSITIONS - depth].flatten(0, 1), ids[:, 1 + depth :].flatten(), reduction="sum"
        )
        for depth, right in enumerate(wanted)
    ]
    assert [*output.losses] == [f"mtp_{depth}_loss" for depth in range(1, layers + 1)]
    for mine, right in zip([output.loss_sum, *output.losses.values()], sums, strict=True):
        coeff = 1.0 if right is sums[0] else COEFF / layers
        assert mine.item() == pytest.approx(coeff * right.item(), rel=LOSS)
    (sums[0] + COEFF / layers * sum(sums[1:])).backward()
    output.objective.backward()
    with tempfile.TemporaryDirectory() as name:
        save(main, mtp, Path(name), grads=True)
        grads = tensors_of(Path(name))
    norm = torch.cat([grad.flatten() for grad in grads.values()]).norm()
    for piece in canonical_parameters(found.module):
        origin, grad = found.source.origins[piece.name], piece.parameter.grad
        right = origin.of(grads[origin.name])
        assert grad is not None, piece.name
        assert (piece.of(grad) - right).norm() <= max(GRADIENT * right.norm(), FLOOR * norm), piece.name


def test_no_token_beyond_the_sequence_the_document_or_into_padding_is_predicted() -> None:
    ids = torch.arange(10, 16).unsqueeze(0)
    batch = Batch(ids_BS=ids, labels_BS=ids + 1)
    assert ids_ahead(batch, 1).tolist() == [[11, 12, 13, 14, 15, 16]]
    assert ids_ahead(batch, 3).tolist() == [[13, 14, 15, 16, 0, 0]]
    assert labels_ahead(batch, 2).tolist() == [[13, 14, 15, 16, IGNORED, IGNORED]]
    packed = replace(batch, documents_BS=torch.tensor([[0, 0, 0, 1, 1, 1]]))
    assert labels_ahead(packed, 1).tolist() == [[12, 13, IGNORED, 15, 16, IGNORED]]
    padded = replace(batch, mask_BS=torch.tensor([[True, True, True, True, False, False]]))
    assert labels_ahead(padded, 1).tolist() == [[12, 13, 14, IGNORED, IGNORED, IGNORED]]
    assert labels_ahead(batch, 9).tolist() == [[IGNORED] * 6]


def test_a_sequence_of_a_pack_sees_no_ids_of_the_next() -> None:
    """Its own last label, which stands behind it, is all that it may see."""
    ids = torch.tensor([[1, 2, 3, 4, 11, 12, 13]])
    labels = torch.tensor([[2, 3, 4, 5, 12, 13, 14]])
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1]])
    pack = Batch(ids_BS=ids, labels_BS=labels, documents_BS=documents, lengths=(4, 3))
    assert ids_ahead(pack, 1).tolist() == [[2, 3, 4, 5, 12, 13, 14]]
    assert ids_ahead(pack, 2).tolist() == [[3, 4, 5, 0, 13, 14, 0]]
    assert ids_ahead(pack, 3).tolist() == [[4, 5, 0, 0, 14, 0, 0]]


TREE = {**SMALL, "model": {**SMALL["model"], "vocab_size": 64, "mtp_layers": 2}}
PARALLEL = {
    "tp 2": (2, {"dense": {"tp": 2}, "experts": {"ep": 2}}),
    "sharded": (4, {"dense": {"tp": 2, "shard": "all"}, "experts": {"ep": 2, "shard": "all"}}),
}


@pytest.mark.parametrize(("layout", "tied"), [("tp 2", True), pytest.param("sharded", False, marks=pytest.mark.deep)])
def test_trains_as_on_one_rank(pool: RankPool, layout: str, tied: bool) -> None:
    tree = {**TREE, "model": {**TREE["model"], "tie_embeddings": tied}}
    world, parallel = PARALLEL[layout]
    (alone,) = pool.run(short_run, 1, tree, 2)
    runs = pool.run(short_run, world, {**tree, "parallel": parallel}, 2)
    for found, wanted in zip(runs[0].results, alone.results, strict=True):
        assert found.loss == pytest.approx(wanted.loss, rel=2e-6)
        assert found.grad_norm == pytest.approx(wanted.grad_norm, rel=2e-6)
        for name in ("mtp_1_loss", "mtp_2_loss"):
            assert found.aux_losses[name] == pytest.approx(wanted.aux_losses[name], rel=2e-6)


def test_evaluation_predicts_the_next_token_alone(pool: RankPool) -> None:
    plain = {**TREE, "model": {**TREE["model"], "mtp_layers": 0}}
    (with_losses,), (without,) = (pool.run(evaluated, 1, tree) for tree in (TREE, plain))
    assert with_losses == without


def evaluated(tree: Any) -> tuple[float, int]:
    """Return the loss of an evaluation, and the number of layers that report statistics."""
    assembly = assemble_tree(tree, Marks("mtp"), defaults=defaults(), machine=Machine(device="cpu"))
    model: Any = build_model(assembly, open_layout(assembly, "cpu"), torch.device("cpu"), Shared())
    initialise(model, seed=0, std=model.init_std)
    ids = torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(0))
    output = model.eval()(Batch(ids_BS=ids[:, :-1], labels_BS=ids[:, 1:]))
    return output.loss_sum.item(), len(output.layers)
