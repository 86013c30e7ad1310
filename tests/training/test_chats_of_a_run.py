"""A run on chats: packs have the losses and gradients of each sample alone, and the template goes where the model goes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from broken_optimizers import Sound
from chat_cases import CONVERSATIONS, LLAMA, TODAY, WEATHER, write_folder
from command_here import moefw_says
from moefw import Batch
from moefw.compose.assembly import Assembly
from moefw.compose.build import Shared
from moefw.core.contracts import Layout
from moefw.testing.pool import RankPool
from moefw.testing.training import SMALL, short_run
from moefw.training.feed import Packs, feed_of
from moefw.training.session import Session

IDS = 400
ANSWERS = (1, 12, 3, 30, 7, 2)
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp 2 and ep 2": {"parallel": {"experts": {"ep": 2}}},
    "cp 2": {"parallel": {"dense": {"cp": 2}, "experts": {"ep": 2}}},
    "pp 2": {"parallel": {"pp": 2}, "pipeline": {"use": "1f1b"}},
}


def rows() -> list[dict[str, Any]]:
    """Conversations of very unequal length, some with more prompt than answer."""
    made = []
    for number in range(48):
        answer = f"{number} " + "answer " * ANSWERS[number % 6]
        asked = {"role": "user", "content": "is it warm? " * (1 + number % 4)}
        made.append({"messages": [asked, {"role": "assistant", "content": answer}]})
    return [*made, {**CONVERSATIONS["tools"], "tools": [WEATHER]}]


@pytest.fixture
def data(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    folder = write_folder(tmp_path / "tokenizer", LLAMA)
    return {"use": "chat", "path": str(path), "tokenizer": str(folder), "date": TODAY, "heldout": 0.2}


def tree(data: Mapping[str, Any], packing: str, **parts: Any) -> dict[str, Any]:
    train = {
        **{"steps": 2, "tokens_per_step": 512, "micro_batch": 2, "seq_len": 128, "packing": packing, "lr": 1.0},
        **{"optimizer": {"use": "sound"}, "clip_norm": None},
    }
    model = {**SMALL["model"], "vocab_size": IDS, "num_layers": 2, "init_std": 0.1}
    routing = {"use": "topk", "balance": []}
    return {**SMALL, "model": model, "routing": routing, "train": train, "data": dict(data), **parts}


def packs(cache: str, assembly: Assembly, layout: Layout) -> Callable[[int], list[Batch]]:
    """The micro-batches that a run reads."""
    feed = _feed(cache, assembly, layout)
    return lambda step: list(feed.micro_batches(step))


def alone(cache: str, assembly: Assembly, layout: Layout) -> Callable[[int], list[Batch]]:
    """The same samples, each a micro-batch of its own, without a pack."""
    feed = _feed(cache, assembly, layout)
    stream = feed.session.data.train

    def read(step: int) -> list[Batch]:
        chosen = feed.order.sequences(step)
        return [_sample(stream, start, count) for start, count in zip(chosen.starts_N, chosen.lengths_N, strict=True)]

    return read


def _feed(cache: str, assembly: Assembly, layout: Layout) -> Packs:
    source = assembly.parts.data.prepare(Path(cache))
    device = torch.device("cpu")
    feed = feed_of(
        Session(
            assembly=assembly, device=device, layout=layout, data=source, model=torch.nn.Identity(), shared=Shared()
        )
    )
    assert isinstance(feed, Packs)
    return feed


def _sample(stream: Any, start: int, count: int) -> Batch:
    ids = torch.from_numpy(stream.read(start, count + 1)).unsqueeze(0)
    trained = torch.from_numpy(np.array(stream.trained(start + 1, count))).unsqueeze(0)
    return Batch(ids_BS=ids[:, :-1], labels_BS=ids[:, 1:], loss_mask_BS=trained)


def gradients(tree: Mapping[str, Any], cache: str, read: Any) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of a step, by name: what plain descent with a rate of 1 subtracts."""
    run = short_run(tree, 1, read=partial(read, cache), plugins=(Sound,))
    return run.results[0].loss, {name: before - run.last[name] for name, before in run.first.items()}


@pytest.mark.fault("packed fine-tuning whose loss is another one (Megatron-Bridge#2952)", "that of each sample alone")
@pytest.mark.parametrize("packing", ["static", "dynamic"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_chats_have_losses_and_gradients_of_each_sample_alone(
    pool: RankPool, data: dict[str, Any], tmp_path: Path, layout: str, packing: str
) -> None:
    cache = str(tmp_path / "cache")
    loss, expected = gradients(tree(data, packing), cache, alone)
    assert max(grad.abs().max().item() for grad in expected.values()) > 1e-2
    for found, grads in pool.run(gradients, 2, tree(data, packing, **LAYOUTS[layout]), cache, packs):
        assert found == pytest.approx(loss, rel=1e-5)
        for name, grad in grads.items():
            assert (grad - expected[name]).norm() <= 1e-4 * expected[name].norm() + 1e-6, name


def test_a_run_shows_what_trains_resumes_and_hands_on_what_a_conversation_needs(
    data: dict[str, Any], tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    model = {"preset": "qwen3-30b-a3b-tiny", "vocab_size": IDS}
    data["variables"] = {"enable_thinking": False}
    spec = tmp_path / "spec.yaml"
    train = {"steps": 2, "tokens_per_step": 256, "micro_batch": 2, "seq_len": 128, "packing": "static", "lr": 1e-3}
    train |= {"eval_every": 2, "eval_tokens": 256, "checkpoint_every": 1}
    run, out = tmp_path / "run", tmp_path / "out"
    spec.write_text(
        json.dumps({"model": model, "data": data, "train": train, "run": {"dir": str(run), "device": "cpu"}})
    )
    said = moefw_says("train", spec)
    assert "of their tokens train (train_on: assistant)" in said
    assert "answer<|eot_id|>⟧" in said
    whole = losses(run)
    sample = (run / "sample.txt").read_text()
    assert "is it warm?" in sample
    assert sample.index("assistant") > sample.index("is it warm?")
    assert "--chat 'How are you?'" in said
    answered = moefw_says("generate", run, "--chat", "is it cold?", "--tokens", "3")
    assert answered.startswith("<s>")
    assert "is it cold?<|eot_id|>" in answered
    moefw_says("train", spec, "--resume=1")
    assert losses(run) == whole
    moefw_says("convert", "export", run, out)
    for folder in (run, out):
        for name in ("chat_template.jinja", "tokenizer_config.json", "generation_config.json", "tokenizer.json"):
            assert (folder / name).read_bytes() == Path(data["tokenizer"], name).read_bytes(), name
    theirs = AutoTokenizer.from_pretrained(out)
    assert theirs.apply_chat_template(CONVERSATIONS["one turn"]["messages"], tokenize=False).startswith("<s>")
    moefw_says("convert", "import", out, tmp_path / "again")
    assert (tmp_path / "again" / "chat_template.jinja").read_text() == LLAMA


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
