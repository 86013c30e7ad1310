"""A token may be routed without being trained on: masks of losses change the loss, and neither routers nor balance.

What other systems got silently wrong stands in the names of the tests: prompts that skip the experts, a mean over the
tokens of a rank instead of all, multi-token prediction over prompts, auxiliary losses that grow as answers get shorter.
"""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from torch import Tensor, nn

from moefw import Batch, ContractError, TokenStream
from moefw.commands.eval import evaluate as moefw_eval
from moefw.commands.train import train as moefw_train
from moefw.compose.build import Shared, build_model, open_layout
from moefw.models.embedding import IGNORED
from moefw.models.mtp import labels_ahead, labels_of_next
from moefw.plugins.data.tokens import TokenFile
from moefw.runtime.naming import initialise
from moefw.runtime.windows import read_trained
from moefw.testing.pool import RankPool
from moefw.testing.training import SMALL, Run, short_run
from moefw.training.engine import Engine, evaluate
from pairwise import deep
from resolved_specs import resolved
from small_spec import small_spec
from training_process import TIMED

AUX = [{"kind": "aux_loss", "coeff": 0.5}, {"kind": "z_loss", "coeff": 0.1}]
BALANCE = "routing.balance=[{kind: aux_loss, coeff: 0.5}]"
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp 2 and ep 2": {"parallel": {"experts": {"ep": 2}}},
    "cp 2": {"parallel": {"dense": {"cp": 2}, "experts": {"ep": 2}}},
    "pp 2": {"parallel": {"pp": 2}, "pipeline": {"use": "1f1b"}},
    "tp 2 and FSDP": {
        "parallel": {"dense": {"tp": 2, "shard": "all"}, "experts": {"ep": 2, "shard": "all"}},
    },
}


def tree(**parts: Any) -> dict[str, Any]:
    model = {**SMALL["model"], "vocab_size": 256, "init_std": 0.1, "mtp_layers": 2, "num_layers": 2}
    routing = {"use": "topk", "balance": [*AUX, {"kind": "aux_loss", "over": "sequence", "coeff": 0.5}]}
    return {**SMALL, "model": model, "routing": routing, "train": {**SMALL["train"], "tokens_per_step": 128}, **parts}


def opened(**parts: Any) -> tuple[nn.Module, Engine]:
    """A model of random weights and its engine, which does not clip."""
    assembly = resolved(json.dumps(tree(**parts)))
    layout = open_layout(assembly, "cpu")
    model = build_model(assembly, layout, torch.device("cpu"), Shared())
    initialise(model, seed=0, std=lambda _: 0.2)
    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.0), layout, clip_norm=None)
    return model.train(), engine


def drawn(sequences: int = 4, positions: int = 16) -> Batch:
    tokens = torch.randint(256, (sequences, positions + 1), generator=torch.Generator().manual_seed(0))
    answers_BS = torch.arange(positions) >= torch.tensor([[3], [16], [9], [12]])[:sequences]
    return Batch(
        ids_BS=tokens[:, :-1],
        labels_BS=tokens[:, 1:],
        seeds_B=torch.arange(sequences),
        loss_mask_BS=answers_BS,
    )


def sequences_of(batch: Batch, chosen: slice) -> Batch:
    fields = ("ids_BS", "labels_BS", "seeds_B", "loss_mask_BS")
    return Batch(**{name: getattr(batch, name)[chosen] for name in fields})


def gradients(model: nn.Module, engine: Engine, *batches: Batch) -> tuple[dict[str, Tensor], Any]:
    result = engine.step(batches, 0.0, _untimed)
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}, result


def _untimed(section: str, *passes: object) -> AbstractContextManager[None]:
    return nullcontext()


def test_the_loss_is_the_mean_over_answers_and_prompts_are_routed_all_the_same() -> None:
    model, engine = opened(routing={"use": "topk", "balance": []}, model={**tree()["model"], "mtp_layers": 0})
    batch = drawn()
    logits_BSV, _ = model.logits(replace(batch, loss_mask_BS=None))
    wanted = F.cross_entropy(logits_BSV[batch.loss_mask_BS].float(), batch.labels_BS[batch.loss_mask_BS])
    expected = torch.autograd.grad(wanted, [*model.parameters()], allow_unused=True)
    found, result = gradients(model, engine, batch)
    _, plain = gradients(model, engine, replace(batch, loss_mask_BS=None))
    assert result.loss == pytest.approx(wanted.item(), rel=1e-6)
    assert result.load_LE == plain.load_LE
    assert result.tokens == plain.tokens == 64
    for (name, _), grad in zip(model.named_parameters(), expected, strict=True):
        assert grad is not None
        torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-7)


def test_micro_batches_are_weighed_by_their_answers() -> None:
    """One of them has none at all."""
    model, engine = opened(routing={"use": "topk", "balance": []})
    whole = drawn()
    found, result = gradients(model, engine, whole)
    each = (sequences_of(whole, slice(row, row + 1)) for row in range(4))
    by_rows, of_rows = gradients(model, engine, *each)
    assert of_rows.loss == pytest.approx(result.loss, rel=1e-6)
    for name, grad in found.items():
        assert (by_rows[name] - grad).norm() <= 1e-5 * grad.norm(), name


def test_auxiliary_losses_do_not_grow_as_answers_get_shorter() -> None:
    """They are means over all valid tokens, in the gradient and in the metrics."""
    model, engine = opened()
    without, other = opened(routing={"use": "topk", "balance": []})
    added = []
    for batch in (drawn(), replace(drawn(), loss_mask_BS=None)):
        with_aux, result = gradients(model, engine, batch)
        plain, _ = gradients(without, other, batch)
        added.append(({name: with_aux[name] - plain[name] for name in plain}, result.aux_losses))
    (masked, told), (whole, told_of_whole) = added
    names = ("aux_loss", "sequence_aux_loss", "z_loss")
    assert {name: told[name] for name in names} == pytest.approx(
        {name: told_of_whole[name] for name in names}, rel=1e-6
    )
    scale = max(grad.abs().max().item() for grad in whole.values())
    assert scale > 1e-3
    for name, grad in whole.items():
        torch.testing.assert_close(masked[name], grad, rtol=1e-3, atol=1e-5 * scale)


def test_a_loss_over_all_layers_is_a_mean_over_all_valid_tokens_too() -> None:
    pooled = {"use": "topk", "balance": [{"kind": "aux_loss", "over": "model", "coeff": 0.5}]}
    model, engine = opened(routing=pooled)
    _, masked = gradients(model, engine, drawn())
    _, whole = gradients(model, engine, replace(drawn(), loss_mask_BS=None))
    (name,) = (name for name in whole.aux_losses if not name.startswith("mtp"))
    assert masked.aux_losses[name] == pytest.approx(whole.aux_losses[name], rel=1e-6)


def test_tokens_ahead_are_trained_where_their_target_is() -> None:
    """The last tokens of a prompt predict the answer; none predicts a prompt (Megatron-LM#3943, Megatron-Bridge#6103)."""
    batch = Batch(
        ids_BS=torch.tensor([[1, 2, 3, 4, 5, 6]]),
        labels_BS=torch.tensor([[2, 3, 4, 5, 6, 7]]),
        loss_mask_BS=torch.tensor([[False, False, True, True, False, True]]),
    )
    assert labels_of_next(batch).tolist() == [[IGNORED, IGNORED, 4, 5, IGNORED, 7]]
    assert labels_ahead(batch, 1).tolist() == [[IGNORED, 4, 5, IGNORED, 7, IGNORED]]
    assert labels_ahead(batch, 2).tolist() == [[4, 5, IGNORED, 7, IGNORED, IGNORED]]
    padded = replace(batch, mask_BS=torch.tensor([[True, True, True, False, True, True]]))
    assert labels_of_next(padded).tolist() == [[IGNORED, IGNORED, 4, IGNORED, IGNORED, 7]]
    assert labels_ahead(padded, 1).tolist() == [[IGNORED, 4, IGNORED, IGNORED, 7, IGNORED]]


def test_an_evaluation_is_a_mean_over_answers() -> None:
    model, engine = opened()
    batch = drawn()
    logits_BSV, _ = model.eval().logits(replace(batch, loss_mask_BS=None))
    wanted = F.cross_entropy(logits_BSV[batch.loss_mask_BS].float(), batch.labels_BS[batch.loss_mask_BS])
    halves = [sequences_of(batch, slice(0, 2)), sequences_of(batch, slice(2, 4))]
    assert evaluate(model, halves, engine.layout) == pytest.approx(wanted.item(), rel=1e-6)


def assert_alike(runs: list[Run], alone: Run) -> None:
    for found, wanted in zip(runs[0].results, alone.results, strict=True):
        assert found.loss == pytest.approx(wanted.loss, rel=2e-6)
        assert found.tokens == wanted.tokens
        assert found.aux_losses == pytest.approx(wanted.aux_losses, rel=5e-6)
        assert found.grad_norms == pytest.approx(wanted.grad_norms, rel=2e-5)
        assert found.load_LE == wanted.load_LE


@pytest.mark.parametrize("layout", ["dp 2 and ep 2", "cp 2", *deep("pp 2", "tp 2 and FSDP")])
@pytest.mark.parametrize("padded", [False, *deep(True)])
def test_a_layout_changes_neither_the_loss_nor_what_is_balanced(pool: RankPool, layout: str, padded: bool) -> None:
    how = (padded, False, None, (), True)
    (alone,) = pool.run(short_run, 1, tree(), 2, *how)
    assert_alike(pool.run(short_run, 2, tree(**LAYOUTS[layout]), 2, *how), alone)


def _even(self: TokenFile, start: int, count: int) -> Any:
    """Every even byte is to be predicted, as if it were an answer."""
    return self.read(start, count) % 2 == 0


def _of_even_labels(engine: Engine, batches: list[Batch], scaled: Any = Engine._scaled) -> Any:
    """The scales of batches that mask the tokens whose *label* is odd."""
    for batch in batches:
        valid_BS = torch.ones_like(batch.ids_BS) if batch.mask_BS is None else batch.mask_BS
        assert batch.loss_mask_BS is not None
        assert not ((batch.loss_mask_BS != (batch.labels_BS % 2 == 0)) & valid_BS.bool()).any()
    return scaled(engine, batches)


@pytest.mark.parametrize("packing", ["none", *deep("static")])
def test_a_run_on_a_source_with_prompts_resumes_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packing: str
) -> None:
    spec = small_spec(tmp_path, tokens_per_step=512, steps=4, eval_every=2, checkpoint_every=2)
    plain = lines_of(spec, tmp_path / "plain", packing)
    monkeypatch.setattr(TokenFile, "trained", _even)
    monkeypatch.setattr(Engine, "_scaled", _of_even_labels)
    masked = lines_of(spec, tmp_path / "masked", packing)
    assert masked[0]["loss"] != plain[0]["loss"]
    assert masked[0]["aux_loss"] == pytest.approx(plain[0]["aux_loss"], rel=1e-6)
    assert masked[0]["experts"] == plain[0]["experts"]
    assert lines_of(spec, tmp_path / "masked", packing, "--resume=2") == masked
    assert "eval_bits_per_byte" in plain[-1]
    assert "eval_bits_per_byte" not in masked[-1]
    done = CliRunner().invoke(moefw_eval, [str(tmp_path / "masked")], catch_exceptions=False)
    assert f"{masked[-1]['eval_loss']:.4f} nats a token of held-out text, of the tokens that" in done.output


def lines_of(spec: Path, run: Path, packing: str, *more: str) -> list[dict[str, Any]]:
    words = [str(spec), f"run.dir={run}", f"train.packing={packing}", BALANCE, *more]
    done = CliRunner().invoke(moefw_train, words, standalone_mode=False, catch_exceptions=False)
    assert done.return_value == 0
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{key: value for key, value in line.items() if key not in TIMED} for line in lines]


class Prompts(TokenStream):
    name = "prompts"

    def __len__(self) -> int:
        return 10

    def read(self, start: int, count: int) -> Any:
        raise NotImplementedError

    def trained(self, start: int, count: int) -> Any:
        return [True] * count


def test_a_stream_that_returns_no_mask_is_named() -> None:
    with pytest.raises(ContractError, match=r"prompts: trained\(5, 2\) returned \[True, True\], not 2 values, bool"):
        read_trained(Prompts(), 5, 2)
