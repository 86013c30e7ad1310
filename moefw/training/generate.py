"""Text generation, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moefw.core.data import DataSource
from moefw.core.errors import DataError
from moefw.core.stages import Batch
from moefw.models.past import Past
from moefw.runtime.communication.agreement import everywhere
from moefw.runtime.finite import is_finite
from moefw.system.stamps import stamp
from moefw.training.errors import NotFiniteError
from moefw.training.step_parameters import step_parameters

RECOMPUTES: Final = "no past is kept (moefw.CachedAttention, cp 1), so each token is generated from all before it"


def keeps_past(model: nn.Module) -> bool:
    """Whether a model computes new tokens alone, behind what it keeps of those before (``extend``)."""
    return bool(getattr(model, "keeps_past", False))


@torch.no_grad()
def generate(
    model: nn.Module,
    data: DataSource,
    prompt: Sequence[int],
    *,
    tokens: int,
    temperature: float,
    seed: int,
    window: int,
    group: ProcessGroup | None = None,
) -> str:
    """Text of ``prompt`` and of up to ``tokens`` tokens more, drawn from the softmax at ``temperature``.

    It ends behind one of ``DataSource.ends``. At temperature 0 each token is the likeliest. ``window``: see
    :class:`Reader`. Ranks that share the model pass the same arguments, and their host group as ``group``: its first
    rank chooses each token, as logits may differ in their last bits, and the forward passes are collective. Raises
    DataError if the prompt is empty, and NotFiniteError.
    """
    if not prompt:
        raise DataError("the prompt is empty.", "Give --prompt some text.")
    ids = [*prompt]
    generator = torch.Generator().manual_seed(seed)
    was_training = model.training
    model.eval()
    read = Reader(model, window)
    with step_parameters(model).in_forward():
        for _ in range(tokens):
            stamp("sampling text")
            logits_V = read(ids)[: data.vocab_size]
            of_ranks = everywhere(_chosen(logits_V, temperature, generator), group)
            if None in of_ranks:
                raise NotFiniteError("the logits of the next token are not finite.")
            ids.append(of_ranks[0])
            if ids[-1] in data.ends:
                break
    model.train(was_training)
    return data.decode(ids)


def _chosen(logits_V: Tensor, temperature: float, generator: torch.Generator) -> int | None:
    """A token drawn from the softmax at a temperature, at 0 the likeliest; None: logits are not finite."""
    if not is_finite(logits_V):
        return None
    if temperature == 0:
        return int(logits_V.argmax())
    return int(torch.multinomial((logits_V / temperature).softmax(-1), 1, generator=generator))


class Reader:
    """Reads a text that grows, and computes only its new tokens if the attention of ``model`` keeps the past.

    The model sees the last ``window`` tokens of what it is first given. When the window is full, it goes on with the
    newer half, whose positions count from 0 again: so it meets no position that it was not trained on, and computes
    tokens again only once in half a window. ``keep``: whether to keep the past; None: if the attention can.
    """

    def __init__(self, model: nn.Module, window: int, *, keep: bool | None = None) -> None:
        self.model = model
        self.window = window
        self.keep = keeps_past(model) if keep is None else keep
        self._first = self._read = 0
        self._past: Past | None = None

    def __call__(self, ids: Sequence[int]) -> Tensor:
        """Logits of the next token, ``(vocabulary)`` fp32 on the host. ``ids`` begin with those before."""
        if len(ids) - self._first > self.window:
            self._first = len(ids) - (max(1, self.window // 2) if self._read else self.window)
            self._past = None
        start = self._read if self._past else self._first
        model = self.model
        device = next(self.model.parameters()).device
        new = torch.tensor([ids[start:]], device=device)
        batch = Batch(ids_BS=new, labels_BS=new, dropless=True)
        run: Any = model
        if self.keep:
            logits_BSV, self._past = run.extend(batch, self._past)
        else:
            logits_BSV, _ = run.logits(batch)
        self._read = len(ids)
        logits_V: Tensor = logits_BSV[0, -1].float().cpu()
        return logits_V
