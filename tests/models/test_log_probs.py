"""Log-probabilities of given tokens are those of ``transformers``, values and gradients, in every layout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import moefw
from hf_models import VOCABULARY, model_of
from moefw.core.errors import ContractError
from moefw.testing.pool import RankPool

FAMILIES = ["qwen3_moe", "gpt_oss", "deepseek_v3"]
TEXT = torch.randint(VOCABULARY, (4, 15), generator=torch.Generator().manual_seed(0))
IDS = TEXT[:, :-1]
LABELS = TEXT[:, 1:].clone()
LABELS[1, 4:6] = -100
REWARDS = torch.randn(LABELS.shape, generator=torch.Generator().manual_seed(1))
SIDES = {"left": slice(0, 4), "right": slice(9, None)}
TRAIN = {"tokens_per_step": 64, "micro_batch": 1, "seq_len": 16}
LAYOUTS: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "dp 2, ep 2": (2, {"experts": {"ep": 2}}),
    "tp 2, ep 2": (2, {"dense": {"tp": 2}, "experts": {"ep": 2}}),
    "cp 2, ep 2": (2, {"dense": {"cp": 2}, "experts": {"ep": 2}}),
    "dp 2, tp 2, sharded": (4, {"dense": {"tp": 2, "shard": "all"}, "experts": {"ep": 2, "shard": "all"}}),
}


def mask_of(side: str | None) -> Tensor | None:
    """All tokens, or padding on one side of the first sequence."""
    if side is None:
        return None
    mask = torch.ones_like(IDS)
    mask[0, SIDES[side]] = 0
    return mask


def of_transformers(oracle: Any, mask: Tensor | None) -> Tensor:
    """Log-probabilities by softmax and gather; 0 for padding and where there is no label."""
    logits = oracle(input_ids=IDS, attention_mask=mask).logits
    values = logits.float().log_softmax(-1).gather(-1, LABELS.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    absent = LABELS == -100
    return values.masked_fill(absent if mask is None else absent | (mask == 0), 0.0)


def gradients_by_name(model: moefw.Pretrained) -> dict[str, Tensor]:
    """Gradients as they would stream if they were weights. Collective."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    return dict(moefw.stream_pretrained(model))


def close(ours: Tensor, theirs: Tensor, allowed: float) -> bool:
    return bool((ours - theirs).abs().max() <= allowed * theirs.abs().max())


def same_gradients(ours: Mapping[str, Tensor], oracle: Any) -> None:
    theirs = {name: parameter.grad for name, parameter in oracle.named_parameters()}
    assert ours.keys() >= theirs.keys()
    for name, grad in theirs.items():
        assert (ours[name] - grad).norm() <= 1e-4 * grad.norm(), name


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients_are_those_of_transformers(family: str, side: str | None, tmp_path: Path) -> None:
    oracle = model_of(family)
    oracle.save_pretrained(tmp_path, save_original_format=False)
    wanted = of_transformers(oracle, mask_of(side))
    (REWARDS * wanted).sum().backward()
    model = moefw.from_pretrained(tmp_path, model={"loss_chunk": 5})
    values = model.log_probs(IDS, LABELS, mask_of(side))
    assert values.dtype == torch.float32
    assert close(values, wanted, 1e-5)
    (REWARDS * values).sum().backward()
    model.average_gradients()
    same_gradients(gradients_by_name(model), oracle)


def of_ranks(folder: Path, parallel: Mapping[str, Any], side: str | None) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probabilities and averaged gradients of a rank that has its part of the sequences over dp."""
    model = moefw.from_pretrained(folder, parallel=parallel, train=TRAIN)
    own = model.layout.index("dp"), model.layout.size("dp")
    ids, labels, rewards = (each.chunk(own[1])[own[0]] for each in (IDS, LABELS, REWARDS))
    mask = mask_of(side)
    values = model.log_probs(ids, labels, None if mask is None else mask.chunk(own[1])[own[0]])
    (rewards * values).sum().mul(own[1]).backward()
    model.average_gradients()
    return values.detach(), gradients_by_name(model)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("family", "side"), [("qwen3_moe", "left"), ("deepseek_v3", None)])
def test_ranks_that_split_the_model_and_the_tokens_compute_the_same(
    pool: RankPool, family: str, side: str | None, layout: str, tmp_path: Path
) -> None:
    """Also of a length that ranks of cp do not divide."""
    world, parallel = LAYOUTS[layout]
    oracle = model_of(family)
    oracle.save_pretrained(tmp_path, save_original_format=False)
    wanted = of_transformers(oracle, mask_of(side))
    (REWARDS * wanted).sum().backward()
    sharing = parallel.get("dense", {}).get("tp", 1) * parallel.get("dense", {}).get("cp", 1)
    parts = wanted.chunk(world // sharing)
    for rank, (values, gradients) in enumerate(pool.run(of_ranks, world, tmp_path, parallel, side)):
        assert close(values, parts[rank // sharing], 1e-5)
        same_gradients(gradients, oracle)


def of_stages(folder: Path) -> Tensor:
    model = moefw.from_pretrained(folder, parallel={"pp": 2}, train={**TRAIN, "tokens_per_step": 128})
    with torch.no_grad():
        return model.eval().log_probs(IDS, LABELS)


def test_stages_compute_values_alone(pool: RankPool, tmp_path: Path) -> None:
    oracle = model_of("qwen3_moe")
    oracle.save_pretrained(tmp_path)
    for values in pool.run(of_stages, 2, tmp_path):
        assert close(values, of_transformers(oracle, None), 1e-5)


def test_documents_in_one_sequence_are_each_by_itself(tmp_path: Path) -> None:
    model_of("qwen3_moe").save_pretrained(tmp_path)
    model = moefw.from_pretrained(tmp_path).eval()
    documents = torch.tensor([[0] * 5 + [1] * 9] * 4)
    together = model.log_probs(IDS, LABELS, documents=documents)
    apart = [model.log_probs(IDS[:, part], LABELS[:, part]) for part in (slice(0, 5), slice(5, None))]
    torch.testing.assert_close(together, torch.cat(apart, 1), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(together, model.log_probs(IDS, LABELS))
    mask = torch.ones_like(IDS)
    mask[:, 12:] = 0
    padded = model.log_probs(IDS, LABELS, mask, documents)
    torch.testing.assert_close(padded[:, :12], together[:, :12])
    assert not padded[:, 12:].any()


class LargestLogits(TorchDispatchMode):
    """The most values in a tensor whose last dimension is the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.values = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.dim() and tensor.shape[-1] == VOCABULARY:
                self.values = max(self.values, tensor.numel())
        return result


def test_no_more_rows_of_logits_are_held_than_a_chunk(tmp_path: Path) -> None:
    model_of("qwen3_moe").save_pretrained(tmp_path)
    model = moefw.from_pretrained(tmp_path, model={"loss_chunk": 3})
    with LargestLogits() as largest:
        model.log_probs(IDS, LABELS).sum().backward()
    assert largest.values == max(3, model.module.options.dim) * VOCABULARY  # a weight's transpose is larger


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        (LABELS[:, 1:], r"labels are \(4, 13\) torch\.int64, and ids \(4, 14\)\."),
        (LABELS.int(), r"labels are \(4, 14\) torch\.int32"),
        (LABELS.masked_fill(LABELS == -100, -1), r"-1 is a label and no id of a token\. Use -100 where"),
        (LABELS.masked_fill(LABELS == -100, VOCABULARY), rf"{VOCABULARY} is a label and no id of a token\."),
    ],
)
def test_labels_that_are_none_are_refused(labels: Tensor, says: str, tmp_path: Path) -> None:
    model_of("qwen3_moe").save_pretrained(tmp_path)
    with pytest.raises(ContractError, match=says):
        moefw.from_pretrained(tmp_path).log_probs(IDS, labels)


AUX = {"balance": [{"kind": "aux_loss", "coeff": 0.5, "over": "sequence"}, {"kind": "z_loss"}]}


def balanced(folder: Path, parallel: Mapping[str, Any]) -> dict[str, Tensor]:
    """Gradients of the losses of routers alone."""
    model = moefw.from_pretrained(folder, parallel=parallel, train=TRAIN, routing=AUX)
    model.log_probs(IDS, LABELS)
    model.losses().backward()
    model.average_gradients()
    return gradients_by_name(model)


@pytest.mark.parametrize("dense", [{"tp": 2}, {"cp": 2}])
def test_losses_of_routers_count_once_where_ranks_share_tokens(
    pool: RankPool, dense: Mapping[str, int], tmp_path: Path
) -> None:
    model_of("qwen3_moe").save_pretrained(tmp_path)
    whole = balanced(tmp_path, {})
    for gradients in pool.run(balanced, 2, tmp_path, {"dense": dense, "experts": {"ep": 2}}):
        for name, grad in whole.items():
            assert (gradients[name] - grad).norm() <= 1e-4 * grad.norm(), name
