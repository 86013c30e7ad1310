"""Packed documents are computed as each of them alone, and a run of them resumes bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from data_cases import write
from megatron_cases import bytes_of, write_pair
from moefw import ContractError, PlanError, TokenStream
from moefw.commands.eval import evaluate
from moefw.commands.train import train
from moefw.compose.build import Shared, build_model, open_layout
from moefw.core.stages import Batch, Output
from moefw.planner import ledger
from moefw.plugins.data.text import Text
from moefw.runtime.naming import initialise
from moefw.runtime.windows import number_documents
from moefw.training import session
from moefw.training.session import Session
from resolved_specs import problems_of, resolved
from small_spec import small_spec
from training_process import TIMED

LENGTHS = (7, 1, 10, 2, 6)
MODELS = {
    "windows and sinks": {"model": {"preset": "gpt-oss-20b-tiny"}},
    "latent attention and two tokens more": {"model": {"preset": "deepseek-v3-tiny", "mtp_layers": 2}},
    "grouped heads": {"model": {"preset": "qwen3-moe-tiny"}},
}


def batch(windows: np.ndarray, numbers: np.ndarray | None = None, **more: Any) -> Batch:
    given: Any = SimpleNamespace(device=torch.device("cpu"))
    given._placed = lambda values: Session._placed(given, values)
    return Session.batch(given, windows, documents_BS=numbers, **more)


def test_positions_restart_and_the_last_token_of_a_document_has_no_label() -> None:
    numbers = np.array([[3, 3, 3, 4, 6, 6, 7], [0, 0, 0, 0, 0, 0, 0]])
    made = batch(np.arange(14).reshape(2, 7), numbers)
    assert made.positions_BS is not None
    assert made.mask_BS is not None
    assert made.positions_BS.tolist() == [[0, 1, 2, 0, 0, 1], [0, 1, 2, 3, 4, 5]]
    assert made.mask_BS.tolist() == [[True, True, False, False, True, False], [True] * 6]
    assert made.documents_BS is not None
    assert made.documents_BS.tolist() == [[3, 3, 3, 4, 6, 6], [0] * 6]
    padded = batch(np.arange(14).reshape(2, 7), numbers, valid=1)
    assert padded.mask_BS is not None
    assert padded.mask_BS.tolist() == [[True, True, False, False, True, False], [False] * 6]
    assert batch(np.arange(14).reshape(2, 7)).mask_BS is None


def test_windows_number_the_documents_that_they_hold(tmp_path: Path) -> None:
    folder = write(tmp_path, {f"{number}.txt": "x" * size for number, size in enumerate([3, 1, 5, 2, 2])})
    stream = Text(path=str(folder / "0.txt").replace("0.txt", ""), heldout=0.01).prepare(tmp_path / "cache").train
    starts = set(stream.document_starts(0, len(stream)).tolist())
    for begin in range(len(stream) - 6):
        (numbers,) = number_documents(stream, [begin], seq_len=5)
        assert (np.flatnonzero(np.diff(numbers)) + begin + 1).tolist() == sorted(
            starts & set(range(begin + 1, begin + 6))
        )


@pytest.mark.parametrize("name", MODELS)
def test_packed_documents_have_the_losses_and_gradients_of_each_alone(name: str) -> None:
    """The loss of a document alone is that of all its tokens but the first."""
    tree = MODELS[name] | {"routing": {"balance": []}, "run": {"device": "cpu"}}
    assembly = resolved(json.dumps(tree))
    model = build_model(assembly, open_layout(assembly, "cpu"), torch.device("cpu"), Shared())
    initialise(model, seed=0, std=lambda name: 0.2 if model.init_std(name) is not None else None)
    model.train()
    vocabulary: Any = assembly.parts.model
    ids = np.random.default_rng(0).integers(1, vocabulary.vocab_size, sum(LENGTHS))
    numbers = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    packed, packed_grads = run(model, batch(ids[None], numbers[None]))
    alone, alone_grads = dict[str, float](), dict[str, torch.Tensor]()
    for document in np.split(ids, np.cumsum(LENGTHS)[:-1]):
        if len(document) > 1:
            losses, grads = run(model, batch(document[None]))
            alone = {key: alone.get(key, 0.0) + value for key, value in losses.items()}
            alone_grads = {key: alone_grads.get(key, 0.0) + value for key, value in grads.items()}
    assert packed["tokens"] == alone["tokens"] == sum(LENGTHS) - len(LENGTHS)
    assert packed == pytest.approx(alone, rel=2e-6)
    whole = torch.stack([grad.norm() for grad in alone_grads.values()]).norm()
    for key, grad in alone_grads.items():
        assert (packed_grads[key] - grad).norm() <= max(1e-4 * grad.norm(), 1e-6 * whole), key
    crossing, _ = run(model, batch(ids[None]))
    assert crossing["loss"] != pytest.approx(alone["loss"], rel=1e-3)


def run(model: torch.nn.Module, made: Batch) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    model.zero_grad(set_to_none=True)
    output: Output = model(made)
    output.objective.backward()
    grads = {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}
    further = {name: loss.item() for name, loss in output.losses.items()}
    return {"loss": output.loss_sum.item(), "tokens": output.num_tokens.item(), **further}, grads


@pytest.fixture
def spec(write_spec: Callable[..., Path]) -> Path:
    """A blend of text and ids, whose documents are shorter than a window."""
    path = write_spec(tokens_per_step=512, steps=4, eval_every=2, checkpoint_every=2)
    folder = write(
        path.parent / "corpus", {f"{n}.txt": f"a fox {n} jumps over a dog\n" * (n % 4 + 1) for n in range(60)}
    )
    pair = write_pair(path.parent / "pair", bytes_of(*(f"pair {n} " * (n % 5 + 1) for n in range(90))), "uint8")
    text = {"use": "text", "path": str(folder), "heldout": 0.2, "weight": 3}
    ids = {"use": "megatron", "path": str(pair), "tokenizer": "bytes", "heldout": 0.2}
    tree = json.loads(path.read_text())
    tree["data"], tree["train"]["document_mask"] = {"use": "blend", "parts": [text, ids]}, True
    path.write_text(json.dumps(tree))
    return path


def records(spec: Path, *arguments: str) -> list[dict[str, Any]]:
    done = CliRunner().invoke(train, [str(spec), *arguments], standalone_mode=False, catch_exceptions=False)
    assert done.return_value == 0
    lines = [json.loads(line) for line in (spec.parent / "run" / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in TIMED} for line in lines]


def test_a_blend_of_packed_documents_resumes_bit_for_bit(spec: Path) -> None:
    whole = records(spec)
    assert len(whole) == 4
    assert records(spec, "--resume=2") == whole
    masked, crossing = (evaluated(spec, f"train.document_mask={word}") for word in ("true", "false"))
    assert masked == pytest.approx(whole[-1]["eval_loss"], rel=1e-6)
    assert crossing != pytest.approx(masked, rel=1e-5)


def evaluated(spec: Path, override: str) -> float:
    done = CliRunner().invoke(evaluate, [str(spec.parent / "run"), override, "--json"], catch_exceptions=False)
    return float(json.loads(done.output)["eval_loss"])


class Plain(TokenStream):
    name = "numbers"

    def __len__(self) -> int:
        return 100

    def read(self, start: int, count: int) -> np.ndarray:
        return np.arange(start, start + count)


def test_a_source_that_does_not_tell_where_documents_start_is_refused_before_training() -> None:
    data: Any = SimpleNamespace(vocab_size=10, train=Plain(), heldout=Plain())
    with pytest.raises(PlanError) as caught:
        session._fitting(data, resolved("train: {document_mask: true}"))
    assert str(caught.value) == (
        "train.document_mask keeps documents apart, and numbers does not tell where documents start. "
        "Use train.document_mask: false, or a source that tells."
    )
    assert session._fitting(data, resolved("{}")) is data


@pytest.mark.parametrize("wrong", [None, [1], np.array([1.0]), np.array([[1]]), np.array([9]), np.array([4])])
def test_a_stream_that_tells_no_positions_is_named(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Plain, "document_starts", lambda *_: wrong)
    with pytest.raises(ContractError, match=r"numbers: document_starts\(5, 4\) returned .*, not positions"):
        number_documents(Plain(), [5], seq_len=3)


def test_check_and_plan_know_the_option(tmp_path: Path) -> None:
    (problem,) = problems_of("train: {document_mask: 1}")
    assert "train.document_mask: 1 is not true or false." in problem
    small = json.loads(small_spec(tmp_path).read_text())
    plain, masked = (
        ledger(resolved(json.dumps(small | {"train": small["train"] | {"document_mask": given}})))
        for given in (False, True)
    )
    assert masked.held.batch - plain.held.batch == small["train"]["tokens_per_step"] * 17
    assert masked.peak is not None
    assert plain.peak is not None
    assert masked.peak.total > plain.peak.total, "a kernel with a dense mask holds more"
