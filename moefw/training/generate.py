"""Text generation, token by token."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from moefw.core.data import DataSource
from moefw.core.errors import DataError
from moefw.core.stages import Batch
from moefw.training.faults.stamps import stamp


@torch.no_grad()
def generate(
    model: nn.Module, data: DataSource, prompt: str, *, tokens: int, temperature: float, seed: int, window: int
) -> str:
    """Return ``prompt`` and up to ``tokens`` tokens more, drawn from the softmax at ``temperature`` (0: the likeliest).

    The model sees the last ``window`` tokens. Every rank that shares the model passes the same arguments.
    """
    module: Any = model
    device = next(model.parameters()).device
    ids = data.encode(prompt)
    if not ids:
        raise DataError("the prompt is empty.", "Give --prompt some text.")
    generator = torch.Generator().manual_seed(seed)
    was_training = model.training
    model.eval()
    for _ in range(tokens):
        stamp("sampling text")
        context = torch.tensor([ids[-window:]], device=device)
        logits_BSV, _ = module.logits(Batch(ids_BS=context, labels_BS=context, dropless=True))
        logits_V = logits_BSV[0, -1, : data.vocab_size].float().cpu()
        if temperature == 0:
            ids.append(int(logits_V.argmax()))
        else:
            ids.append(int(torch.multinomial((logits_V / temperature).softmax(-1), 1, generator=generator)))
    model.train(was_training)
    return data.decode(ids)
