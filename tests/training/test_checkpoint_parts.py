"""Each rank writes views of what it stores, and ranks that store the same share it by bytes."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from checkpoint_cases import tiny
from fake_steps import fake_assembly
from moefw.core.errors import ContractError
from moefw.runtime.parallel.opened_layout import OpenedLayout
from moefw.testing.training import SMALL
from moefw.training.checkpoint.files import elements
from moefw.training.checkpoint.parts import Part, parts_of, share


def part(name: str, *shape: int) -> Part:
    values = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    return Part(name=name, values=values, corner=(0,) * len(shape), whole=shape)


def test_sharers_write_every_element_once_and_equal_stretches() -> None:
    chance = random.Random(0)
    for count in (1, 2, 3, 7, 64):
        shapes = [tuple(chance.randrange(1, 40) for _ in range(chance.randrange(4))) for _ in range(30)]
        parts = [part(str(number), *shape) for number, shape in enumerate(shapes)]
        shares = [list(share(parts, index, count)) for index in range(count)]
        written = {each.name: torch.zeros(each.whole) for each in parts}
        for own in shares:
            for each in own:
                inside = tuple(
                    slice(first, first + size) for first, size in zip(each.corner, each.values.shape, strict=True)
                )
                written[each.name][inside] += 1
                assert each.values.equal(parts[int(each.name)].values[inside])
        assert all(times.eq(1).all() for times in written.values())
        total = sum(each.values.nbytes for each in parts)
        widest_slice = max(each.values.nbytes // max(each.whole, default=1) for each in parts)
        for own in shares:
            assert abs(sum(each.values.nbytes for each in own) - total / count) <= widest_slice + 1


def storages(tensors: list[Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def test_what_is_written_is_where_it_is_stored_and_a_number_of_steps_is_written_once() -> None:
    """States that stay on the host may not fit on the device, so nothing moves before it is written."""
    layout = OpenedLayout(fake_assembly(dict(SMALL), 1).layout, "cpu")
    model, optimizer = tiny(1.0)
    parts = parts_of(model, optimizer, layout)
    held = [*model.parameters(), *(value for state in optimizer.state.values() for value in state.values())]
    assert storages([each.values for each in parts]) <= storages(held)
    steps = [(each.name, each.same) for each in parts if each.name.startswith("optimizer/step/")]
    assert steps == [("optimizer/step/embed", ("optimizer/step/norm",))]
    optimizer.state[model.norm]["step"] += 1
    steps = [(each.name, each.same) for each in parts_of(model, optimizer, layout) if "/step/" in each.name]
    assert steps == [("optimizer/step/embed", ()), ("optimizer/step/norm", ())]


def test_a_state_of_another_shape_is_refused_by_name() -> None:
    layout = OpenedLayout(fake_assembly(dict(SMALL), 1).layout, "cpu")
    model, optimizer = tiny(1.0)
    optimizer.state[model.embed]["rows"] = torch.zeros(2)
    with pytest.raises(ContractError, match=r"a state \(2,\) rows of embed, whose shape is \(2, 3\)"):
        parts_of(model, optimizer, layout)


@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (2, 3, 4), (1, 1, 6), (3, 1, 2)])
def test_the_boxes_of_a_stretch_are_its_elements_in_order(shape: tuple[int, ...]) -> None:
    numbers = torch.arange(math.prod(shape)).view(shape)
    for begin in range(numbers.numel()):
        for end in range(begin + 1, numbers.numel() + 1):
            boxes = [
                numbers[tuple(slice(first, first + size) for first, size in zip(corner, sizes, strict=True))]
                for corner, sizes in elements(shape, begin, end)
            ]
            assert len(boxes) <= max(1, 2 * len(shape) - 1)
            assert torch.cat([box.reshape(-1) for box in boxes]).tolist() == list(range(begin, end))
