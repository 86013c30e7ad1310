"""A forward and a backward of a saved model, by ``transformers`` and by us: logits, loss, gradients by saved name."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from hypothesis import strategies as st
from torch import Tensor

from hf_models import VOCABULARY, tensors_of
from moefw.compose.pretrained import Pretrained, from_pretrained
from moefw.core.stages import Batch
from moefw.runtime.naming import by_parameter, joined
from moefw.runtime.parallel.gradients import Gradients
from moefw.runtime.parallel.local_shards import whole

IGNORED = -100


@frozen(kw_only=True, eq=False)
class Tokens:
    """Sequences of documents that lie end to end, ``lengths`` for each sequence; what they leave over is padding."""

    ids_BS: Tensor
    labels_BS: Tensor
    lengths: tuple[tuple[int, ...], ...]

    @property
    def valid_BS(self) -> Tensor:
        """Which tokens are no padding."""
        return torch.arange(self.ids_BS.shape[1]) < torch.tensor([sum(each) for each in self.lengths]).unsqueeze(1)

    def batch(self, index: int, count: int) -> Batch:
        """Return part ``index`` of ``count`` of the sequences."""
        documents = [
            [n for n, length in enumerate((*each, self._rest(each))) for _ in range(length)] for each in self.lengths
        ]
        positions = [[at for length in (*each, self._rest(each)) for at in range(length)] for each in self.lengths]
        packed = any(len(each) > 1 for each in self.lengths)
        padded = not bool(self.valid_BS.all())
        given = {
            "ids_BS": self.ids_BS,
            "labels_BS": self.labels_BS,
            "mask_BS": self.valid_BS if padded else None,
            "documents_BS": torch.tensor(documents) if packed else None,
            "positions_BS": torch.tensor(positions) if packed else None,
        }
        mine: Any = {name: None if one is None else one.tensor_split(count)[index] for name, one in given.items()}
        return Batch(**mine, loss_scale=1.0 / self.valid_BS.sum().float())

    def _rest(self, lengths: tuple[int, ...]) -> int:
        return self.ids_BS.shape[1] - sum(lengths)


@st.composite
def tokens(draw: st.DrawFn) -> Tokens:
    """Draw two sequences: whole, padded, or packed with documents."""
    kind, positions = draw(st.sampled_from(["whole", "padded", "packed"])), 14
    lengths = {
        "whole": ((14,), (14,)),
        "padded": ((draw(st.integers(1, 13)),), (14,)),
        "packed": ((draw(st.integers(1, 8)), 5), (draw(st.integers(1, 4)), draw(st.integers(1, 4)), 6)),
    }[kind]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    ids = torch.randint(VOCABULARY, (2, positions + 1), generator=generator)
    return Tokens(ids_BS=ids[:, :-1], labels_BS=ids[:, 1:], lengths=lengths)


@frozen(kw_only=True, eq=False)
class Step:
    """Logits of valid tokens (T, V), the mean of all losses over them, and gradients by the name of the saved tensor."""

    logits: Tensor
    loss: float
    grads: dict[str, Tensor]


def their_step(oracle: Any, given: Tokens) -> Step:
    """Run ``transformers``, each document by itself, padding as it is."""
    logits, labels = [], given.labels_BS.masked_fill(~given.valid_BS, IGNORED)
    for row, lengths in enumerate(given.lengths):
        starts = [sum(lengths[:n]) for n in range(len(lengths))]
        for start, length in zip(starts, lengths, strict=True):
            padding = 3 if len(lengths) == 1 else 0
            ids = given.ids_BS[row : row + 1, start : start + length + padding]
            mask = (torch.arange(ids.shape[1]) < length).long().unsqueeze(0)
            logits.append(oracle(input_ids=ids, attention_mask=mask).logits[0, :length])
    together = torch.cat(logits)
    loss = torch.nn.functional.cross_entropy(together, labels[given.valid_BS])
    return finished(oracle, together, loss)


def their_whole_step(oracle: Any, given: Tokens) -> Step:
    """Run ``transformers`` on all sequences at once, with the loss that balances experts over all layers."""
    padding = given.valid_BS.long() if not given.valid_BS.all() else None
    found = oracle(input_ids=given.ids_BS, attention_mask=padding, output_router_logits=True)
    logits, labels = found.logits[given.valid_BS], given.labels_BS[given.valid_BS]
    loss = torch.nn.functional.cross_entropy(logits, labels) + oracle.config.router_aux_loss_coef * found.aux_loss
    return finished(oracle, logits, loss)


def finished(oracle: Any, logits: Tensor, loss: Tensor) -> Step:
    """Return the step of ``transformers`` that ends in a loss."""
    loss.backward()
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        for parameter in oracle.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        oracle.save_pretrained(folder)
        return Step(logits=logits.detach(), loss=loss.item(), grads=tensors_of(Path(folder)))


def our_step(folder: Path, given: Tokens, sections: dict[str, Any]) -> Step:
    """Run our model on this rank. Gradients are by canonical name, those of this rank's experts. Collective."""
    found = from_pretrained(folder, **sections)
    index, count = found.layout.index("dp"), found.layout.size("dp")
    batch = given.batch(index, count)
    model: Any = found.module
    with torch.no_grad():
        logits, _ = model.logits(batch)
    output = model(batch)
    loss = output.objective * batch.loss_scale
    loss.backward()
    total = loss.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(total)
    Gradients(model, found.layout).add_up()
    valid_bS = given.valid_BS.tensor_split(count)[index]
    return Step(logits=logits[valid_bS], loss=total.item(), grads=_grads(found))


def _grads(found: Pretrained) -> dict[str, Tensor]:
    grads = {}
    for parameter, pieces in by_parameter(found.module):
        values = torch.zeros_like(parameter) if parameter.grad is None else whole(parameter.grad)
        for piece in pieces:
            grad = piece.of(values).clone()
            if piece.shard is not None:
                grad = joined(grad, piece.shard, found.layout.group(piece.shard.axis))
            grads[piece.name] = grad
    return grads
