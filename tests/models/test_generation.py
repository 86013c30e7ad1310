"""Text is generated as ``transformers`` does, from what attentions keep of earlier tokens as from all tokens again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import broken_attentions as attentions
from hf_models import MODELS, model_of
from moefw import from_pretrained
from moefw.core.stages import Batch
from moefw.testing.pool import RankPool
from moefw.testing.suites.runs import open_model, whole_model
from moefw.training.generate import Reader, keeps_past

PROMPT, TOKENS, TIE, NEAR = [3, 1, 4, 1, 5], 24, 1e-4, 1e-5


def ours(family: str, folder: Path) -> tuple[Any, Any]:
    """Return a model of ``transformers`` for evaluation, and the same of ours."""
    oracle = model_of(family).eval()
    oracle.save_pretrained(folder)
    return oracle, from_pretrained(folder).module.eval()


def distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max())


@torch.no_grad()
@pytest.mark.parametrize("family", MODELS)
def test_greedy_tokens_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """But where their two best logits nearly tie, from where on ours are given theirs. Also without a past."""
    oracle, model = ours(family, tmp_path)
    options = {"max_new_tokens": TOKENS, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    oracle.generation_config.eos_token_id = None
    found = oracle.generate(torch.tensor([PROMPT]), pad_token_id=0, **options)
    ids, keeping, again = found.sequences[0].tolist(), Reader(model, 64), Reader(model, 64, keep=False)
    assert len(ids) == len(PROMPT) + TOKENS
    for length, (wanted,) in enumerate(found.logits, len(PROMPT)):
        mine = keeping(ids[:length])
        assert distance(mine, wanted) < NEAR
        assert distance(mine, again(ids[:length])) < NEAR
        first, second = wanted.topk(2).values
        assert mine.argmax() == ids[length] or first - second < TIE * wanted.abs().max()


@torch.no_grad()
def test_a_window_keeps_no_more_than_it_sees_and_a_latent_no_heads(tmp_path: Path) -> None:
    ids = torch.arange(20).view(2, 10)
    batch = Batch(ids_BS=ids, labels_BS=ids)
    _, windows = ours("gpt_oss", tmp_path)
    shapes = [[tuple(each.shape) for each in made] for made in windows.extend(batch, None)[1].layers.values()]
    assert shapes == [[(2, 2, 4, 8)] * 2, [(2, 2, 10, 8)] * 2]
    _, latents = ours("deepseek_v3", tmp_path)
    for made in latents.extend(batch, None)[1].layers.values():
        assert [tuple(each.shape) for each in made] == [(2, 10, 10), (2, 10, 4)]


class Noting:
    """A model that notes how many tokens it is given at a time."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.given = model, list[int]()
        self.parameters = model.parameters

    def extend(self, batch: Batch, past: Any) -> Any:
        self.given.append(batch.ids_BS.shape[1])
        model: Any = self.model
        return model.extend(batch, past)


@torch.no_grad()
@pytest.mark.parametrize(
    ("lengths", "starts", "given"),
    [
        (range(6, 15), [0, 0, 0, 5, 5, 5, 5, 5, 10], [6, 1, 1, 4, 1, 1, 1, 1, 4]),
        (range(11, 14), [3, 8, 8], [8, 4, 1]),
    ],
)
def test_a_full_window_goes_on_with_its_newer_half(
    lengths: range, starts: Sequence[int], given: Sequence[int], tmp_path: Path
) -> None:
    """Positions count from 0 again there. All other tokens are computed once, also those of a prompt of 11."""
    _, model = ours("qwen3_moe", tmp_path)
    ids = torch.randint(62, (14,), generator=torch.Generator().manual_seed(0))
    noting: Any = Noting(model)
    keeping, again = Reader(noting, 8, keep=True), Reader(model, 8, keep=False)
    for length, start in zip(lengths, starts, strict=True):
        seen = ids[start:length].unsqueeze(0)
        wanted = model.logits(Batch(ids_BS=seen, labels_BS=seen))[0][0, -1]
        for reader in (keeping, again):
            assert distance(reader(ids[:length].tolist()), wanted) < NEAR
    assert noting.given == given


def read(parallel: dict[str, Any], world: int) -> tuple[Tensor, Tensor]:
    """Return the logits of a text that grows, of what is kept and of all tokens again."""
    case = whole_model(world, parts={"parallel": parallel}, plugins=(), sizes={"vocab_size": 64})
    model, *_ = open_model(case)
    model.eval()
    with torch.no_grad():
        keeping, again = Reader(model, 64), Reader(model, 64, keep=False)
        texts = [list(range(length)) for length in (3, 4, 5, 9, 10)]
        return torch.stack(list(map(keeping, texts))), torch.stack(list(map(again, texts)))


def test_ranks_that_split_heads_and_weights_keep_the_past(pool: RankPool) -> None:
    layout = {"dense": {"tp": 2, "shard": "all"}, "experts": {"ep": 2, "shard": "all"}}
    for kept, again in pool.run(read, 4, layout, 4):
        torch.testing.assert_close(kept, again, rtol=1e-5, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("made", [attentions.PlainAttention, attentions.KeepsThePast])
def test_text_is_read_again_only_where_an_attention_keeps_nothing(made: Any) -> None:
    plugin = attentions.PLUGINS[made]
    case = whole_model(1, parts={"attention": {"use": plugin.name}}, plugins=(plugin,), sizes={"vocab_size": 64})
    model, *_ = open_model(case)
    assert keeps_past(model) == (made is attentions.KeepsThePast)
    read, again = Reader(model.eval(), 64), Reader(model, 64, keep=False)
    for length in (3, 4, 7):
        assert distance(read(list(range(length))), again(list(range(length)))) < NEAR
