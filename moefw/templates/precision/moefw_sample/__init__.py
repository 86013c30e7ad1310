"""``sample``: a precision recipe."""

from __future__ import annotations

from typing import ClassVar

import moefw
from attrs import frozen

moefw_api = ">=3,<4"


@frozen
class Sample(moefw.PrecisionPlugin):
    """Gives every GEMM its operands in fp32."""

    name: ClassVar[str] = "sample"

    def offers(self, site: moefw.Site) -> moefw.Offers:
        """Operands are plain fp32 tensors; rows are sent unchanged."""
        return moefw.offers(operand=("fp32",), wire=("fp32",))

    def build(self, context: moefw.BuildContext) -> moefw.Precision:
        """Recipe of one layer."""
        from moefw_sample.precision import SampleRecipe

        return SampleRecipe()


@moefw.hookimpl
def moefw_precisions() -> list[type[moefw.PrecisionPlugin]]:
    """Declare the recipe."""
    return [Sample]
