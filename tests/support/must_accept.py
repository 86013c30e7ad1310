"""The combinations that must be accepted: ``tests/must_accept.yaml``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moefw.compose.spec.source import Marks, read_yaml
from moefw.testing.combinations import Combination

Product = Mapping[str, Sequence[Any]]
MUST_ACCEPT = read_yaml((Path(__file__).parents[1] / "must_accept.yaml").read_text(), Marks("must_accept.yaml"), [])


PLAIN = {
    "routing": {"use": "topk", "score": "softmax"},
    "dispatch": {"use": "alltoall"},
    "gemm": {"use": "grouped"},
    "precision": {"use": "fp32"},
    "memory": [],
    "adapter": {"use": "none"},
    "parallel": {"use": "folded"},
}
"""What a product that leaves a section out means. Products with more sections are about whole models."""


def products() -> list[Product]:
    found: Any = MUST_ACCEPT["must_accept"]
    return list(found)


def must_accept(combination: Combination) -> bool:
    spec = combination.spec()
    return any(
        product.keys() <= PLAIN.keys()
        and all(spec[section] in product.get(section, [default]) for section, default in PLAIN.items())
        for product in products()
    )
