"""Seconds to generate 200 tokens from what attentions keep, against all tokens again at each step.

Small models of two attentions with random weights, in fp32, behind a prompt of 100 tokens. The greedy tokens of both
ways are equal. Results go to ``benchmarks/results/generation.json``.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

import record
from moefw.testing.layer_case import LayerCase
from moefw.testing.suites.runs import open_model
from moefw.training.generate import Reader
from timing import race

PRESETS = {"gqa": "qwen3-moe-tiny", "mla": "deepseek-v3-tiny"}
PROMPT = 100
TOKENS = 200
WINDOW = 512


def main(rounds: int = 3) -> None:
    """Measure, print and write."""
    measured = {name: measure(preset, PROMPT, TOKENS, rounds) for name, preset in PRESETS.items()}
    print(measured)
    print(record.write("generation", {"prompt": PROMPT, "tokens": TOKENS, **measured}))


def measure(preset: str, prompt: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Return the median seconds of both ways and their ratio, after checking that their tokens are equal."""
    spec = {"model": {"preset": preset, "zero_init": False}, "run": {"device": "cpu"}}
    model, *_ = open_model(LayerCase(parts=spec, plugins=()))
    ways = {"kept": True, "again": False}
    assert greedy(model.eval(), prompt, tokens, keep=True) == greedy(model, prompt, tokens, keep=False)
    runs = {name: (lambda keep=keep: greedy(model, prompt, tokens, keep=keep)) for name, keep in ways.items()}
    seconds = race(runs, rounds, warm_up=0)
    rounded = {f"{name}, s": round(taken, 2) for name, taken in seconds.items()}
    return {**rounded, "ratio": round(seconds["again"] / seconds["kept"], 1)}


@torch.no_grad()
def greedy(model: nn.Module, prompt: int, tokens: int, *, keep: bool) -> list[int]:
    """Return the prompt and the likeliest tokens behind it."""
    ids = [(7 * at) % 251 for at in range(prompt)]
    read = Reader(model, WINDOW, keep=keep)
    for _ in range(tokens):
        ids.append(int(read(ids).argmax()))
    return ids


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
