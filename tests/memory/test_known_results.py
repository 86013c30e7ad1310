"""Results of operators on fake tensors that are made of their description: they are those that PyTorch computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from moefw.recording.fake_tensors import fake_tensor_world
from moefw.recording.known_results import KnownResults

aten = torch.ops.aten


def results() -> Iterator[Any]:
    """Yield results of operators that make, view, change or return several tensors, of tensors with offsets, too."""
    x = torch.empty(6, 8)
    rows = x[2:]
    y = torch.empty(6, 8, dtype=torch.bfloat16)
    yield x
    yield from (
        rows,
        rows.t(),
        rows[1:, 2:].unsqueeze(0),
        rows.as_strided((2, 2), (8, 1), 3),
        x.as_strided((2, 2), (8, 1), 3),
        rows.as_strided((2, 2), (8, 1)),
    )
    yield from (x[:3].t(), x[3:].t(), rows[1:, 2:].flatten(), rows[2:, 4:].flatten(), x[:2] + 1, x[4:] + 1)
    yield from (x[:2].view(torch.uint8), x[4:].view(torch.uint8))
    yield from (rows.detach(), rows.transpose(0, 1), x[:1].squeeze(0), x[:1].expand(4, 8), x.view(2, 24), rows.view(32))
    yield from (torch.empty_like(rows.t()), torch.zeros_like(y, dtype=torch.float32), torch.zeros(2, 3), torch.empty(0))
    yield from (x + 1, x + y, y + 1, y * 1.0, x.bfloat16(), y.t() @ x.bfloat16(), x.sum(), x.sum(0, keepdim=True))
    yield from x.split([1, 2, 3])
    yield from rows.split([1, 3])
    yield from x.unbind()
    yield from (x.add_(1), rows.mul_(2), torch.empty(0, 4), x.new_zeros(3), torch.zeros(3, dtype=torch.float64))
    yield from x.topk(3)
    yield from torch._foreach_norm([x, rows])
    torch._foreach_add_([x, rows], 1.0)
    yield aten._unsafe_view(x, [48])
    yield torch.mm(x, x.t(), out=torch.empty(6, 6))
    yield x.resize_(3, 3)
    yield x[1:] @ x


def described(block: AbstractContextManager[Any]) -> list[Any]:
    """Return what is seen of the results in a block, and which of them share memory."""
    with block:
        tensors = [*results()]
    memory = [tensor.untyped_storage()._cdata for tensor in tensors]
    return [(*_sizes(tensor), memory.index(own)) for tensor, own in zip(tensors, memory, strict=True)]


def _sizes(tensor: Tensor) -> tuple[Any, ...]:
    nbytes = tensor.untyped_storage().nbytes()
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device, nbytes


def test_results_are_those_of_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KnownResults, "known", {})
    computed = described(FakeTensorMode())
    assert described(KnownResults()) == computed
    assert described(KnownResults()) == computed  # now of their descriptions
    assert described(fake_tensor_world(0, 1)) == computed  # found by a mode above
    known = [call for call, results in KnownResults.known.items() if results is not None]
    assert {call[0].overloadpacket for call in known} >= {
        aten.add,
        aten.mm,
        aten.split_with_sizes,
        aten.topk,
        aten.slice,
    }


def test_a_view_at_another_offset_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KnownResults, "known", {})
    with KnownResults() as mode:
        x = torch.empty(6, 8)
        _ = x[:2].t()
        later = x[4:]
        count = len(mode.known)
        assert later.t().storage_offset() == 32
        assert len(mode.known) == count


def test_values_that_the_host_knows_are_not_forgotten() -> None:
    with KnownResults():
        for number in (2, 3):
            assert int(torch.tensor(number)) == number
            assert int(torch.tensor(number).detach()) == number


def test_a_fake_tensor_of_known_attributes_is_that_of_the_constructor() -> None:
    mode = KnownResults()
    memory = torch.empty(2, 3, device="meta")
    constructed = FakeTensor(mode, memory, torch.device("cpu"))
    for made in (mode.fake(memory, torch.device("cpu")) for _ in range(2)):
        assert type(made) is FakeTensor
        assert vars(made) == vars(constructed)
        assert torch._C._dispatch_keys(made) == torch._C._dispatch_keys(constructed)
        assert (made.device, made.requires_grad) == (constructed.device, constructed.requires_grad)
        assert (made + 1).device == torch.device("cpu")
