"""No kernel adds two ``tl.dot`` to one accumulator in a loop, and the rule tells those that do."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from accumulators import shared_accumulators

KERNELS = sorted((Path(__file__).parents[2] / "kernels").rglob("*.py"))
WITH_DOTS = {"add_wgrad", "expert_gemm", "grouped_gemm"}


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_loop_adds_one_dot_to_an_accumulator(path: Path) -> None:
    assert not shared_accumulators(path.read_text())


def test_kernels_that_multiply_are_among_them() -> None:
    assert {path.parent.name for path in KERNELS if "tl.dot(" in path.read_text()} == WITH_DOTS


FAULTS = {
    "in turn": "acc = tl.dot(a, b, acc)\nacc = tl.dot(c, d, acc)",
    "by keyword": "acc = tl.dot(a, b, acc=acc)\nacc = tl.dot(c, d, acc=acc)",
    "added": "acc += tl.dot(a, b)\nacc += tl.dot(c, d)",
    "in one sum": "acc += tl.dot(a, b) + tl.dot(c, d)",
    "through a name": "products = tl.dot(a, b)\nproducts = tl.dot(c, d, products)\nacc = acc + products",
    "in branches": "if GATE:\n    acc = tl.dot(a, b, acc)\nacc += tl.dot(c, d) * scale",
    "unrolled": "for i in tl.static_range(2):\n    acc = tl.dot(a, b, acc)",
    "by a function": "acc = twice(a, b, acc)",
}
RIGHT = {
    "one": "acc = tl.dot(a, b, acc)",
    "two accumulators": "gate = tl.dot(x, g, gate)\nup = tl.dot(x, u, up)",
    "a product of a product": "p = tl.dot(q, k)\nacc = tl.dot(p, v, acc)",
    "loops in turn": "for i in range(9):\n    acc = tl.dot(a, b, acc)\nfor i in range(9):\n    acc = tl.dot(c, d, acc)",
    "started again": "acc = tl.zeros(shape, tl.float32)\nfor i in range(9):\n    acc = tl.dot(a, b, acc)",
    "by a function": "acc = once(a, b, acc)",
}


def kernel(body: str) -> str:
    functions = """
        def once(a, b, acc):
            return tl.dot(a, b, acc)

        def twice(a, b, acc):
            return tl.dot(a, b, tl.dot(a, b, acc))

        def kernel(a, b, c, d, n):
            for k in range(n):
    """
    return textwrap.dedent(functions).rstrip() + "\n" + textwrap.indent(body, " " * 8)


@pytest.mark.parametrize("body", FAULTS.values(), ids=FAULTS)
def test_a_loop_that_adds_two_is_named(body: str) -> None:
    assert "kernel: acc" in shared_accumulators(kernel(body))


@pytest.mark.parametrize("body", RIGHT.values(), ids=RIGHT)
def test_other_loops_are_right(body: str) -> None:
    assert not shared_accumulators(kernel(body))
