"""The combinations that must be accepted: ``tests/must_accept.yaml``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moefw.compose.spec.source import Marks, read_yaml
from moefw.testing.combinations import Combination

Product = Mapping[str, Sequence[Any]]
MUST_ACCEPT = read_yaml((Path(__file__).parents[1] / "must_accept.yaml").read_text(), Marks("must_accept.yaml"), [])


def products() -> list[Product]:
    found: Any = MUST_ACCEPT["must_accept"]
    return list(found)


def must_accept(combination: Combination) -> bool:
    spec = combination.spec()
    plain = {"routing": {"use": "topk", "score": "softmax"}, "memory": [], "precision": {"use": "fp32"}}
    return any(
        all(spec[section] in product.get(section, [default]) for section, default in plain.items())
        and all(spec[section] in product[section] for section in ("dispatch", "gemm", "parallel"))
        for product in products()
    )
