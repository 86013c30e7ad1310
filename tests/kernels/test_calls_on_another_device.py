"""Functions that compute on another device: nothing is lost on the way there and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kernels_elsewhere import elsewhere


@dataclass(frozen=True)
class Pair:
    left: Tensor
    right: Tensor | None


def add(pair: Pair, into: Tensor, layouts: list[tuple[int, ...]]) -> Pair:
    layouts.append(pair.left.stride())
    assert pair.right is not None
    into.copy_(pair.left + pair.right)
    return Pair(into * 2, None)


def test_tensors_go_with_their_strides_and_come_back_with_what_was_written() -> None:
    base, buffer, layouts = torch.arange(24.0).view(4, 6), torch.zeros(4, 8), []
    pair, into = Pair(base[::2, ::3], torch.tensor(1.0).expand(2, 2)), buffer[:2, 2:4]
    found = elsewhere(add, "cpu")(pair, into, layouts)
    assert into.tolist() == [[1, 4], [13, 16]]
    assert buffer.sum() == into.sum()
    assert found.left.tolist() == [[2, 8], [26, 32]]
    assert found.right is None
    assert layouts == [(12, 3)]


def test_what_a_function_calls_there_is_there_already() -> None:
    x = torch.ones(3)
    inner = elsewhere(lambda given: given, "cpu")
    outer = elsewhere(lambda given: inner(given) is given, "cpu")
    assert outer(x)
    assert inner(x) is not x


def test_gradients_come_back_too() -> None:
    x = torch.tensor([3.0, 2.0], requires_grad=True)
    elsewhere(lambda given: given.square(), "cpu")(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [6.0, 4.0]


class Named(NamedTuple):
    left: Tensor
    right: int


def test_a_named_tuple_keeps_its_names() -> None:
    assert elsewhere(lambda x: Named(x, 1), "cpu")(torch.ones(2)).left.sum() == 2


def test_what_autograd_has_saved_is_not_changed_to_it() -> None:
    x, mask = torch.ones(2, requires_grad=True), torch.tensor([2.0, 3.0])
    product = x * mask
    elsewhere(lambda given: given + 1, "cpu")(mask)
    product.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 3.0]
