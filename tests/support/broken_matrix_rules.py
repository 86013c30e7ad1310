"""A stranger's optimizer with a rule for whole matrices, and rules that break their contract in one way each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from attrs import frozen
from torch import Tensor

import moefw
from moefw.core.plugin import OPTIMIZER, OptimizerPlugin
from moefw.core.records import ParameterFacts, TrainedParameters
from moefw.core.site import Site


class PolarRule(moefw.MatrixRule):
    """Steps along the orthogonal polar factor of a running sum of gradients."""

    beta: ClassVar[float] = 0.9
    decay: ClassVar[float] = 0.1

    def states(self) -> Sequence[str]:
        return ("sum",)

    def direction(self, grad: Tensor, states: Mapping[str, Tensor]) -> Tensor:
        return states["sum"].mul_(self.beta).add_(grad)

    def update(self, matrices_Bnm: Tensor) -> Tensor:
        u, _, vh = torch.linalg.svd(matrices_Bnm, full_matrices=False)
        return u @ vh

    def apply(self, parameter: Tensor, update: Tensor, *, lr: float, shape: tuple[int, int]) -> None:
        parameter.mul_(1 - lr * self.decay)
        parameter.add_(update, alpha=-lr * max(shape) ** 0.5)


@frozen
class Polar(OptimizerPlugin):
    """Right in every way. Those below change its rule."""

    name: ClassVar[str] = "polar"
    ruled: ClassVar[type[PolarRule]] = PolarRule
    weight_decay: float = 0.1

    def offers(self, site: Site) -> moefw.Offers:
        return moefw.offers(update=("elementwise",), region=((OPTIMIZER, "offload"),))

    def states(self) -> Sequence[str]:
        return ("momentum_buffer",)

    def rule(self) -> moefw.MatrixRule:
        return self.ruled()

    def build(self, parameters: TrainedParameters, lr: float) -> Any:
        return torch.optim.SGD([*parameters.values()], lr=lr, momentum=0.9)


@frozen
class KnowsNoShape(Polar):
    name: ClassVar[str] = "knows-no-shape"

    class ruled(PolarRule):  # noqa: N801
        def apply(self, parameter: Tensor, update: Tensor, *, lr: float) -> None:  # type: ignore[override]
            super().apply(parameter, update, lr=lr, shape=(1, 1))


@frozen
class TakesBiases(Polar):
    name: ClassVar[str] = "takes-biases"

    class ruled(PolarRule):  # noqa: N801
        def takes(self, facts: ParameterFacts) -> bool:
            return super().takes(facts) or facts.role == "bias"


@frozen
class TakesByName(Polar):
    name: ClassVar[str] = "takes-by-name"

    class ruled(PolarRule):  # noqa: N801
        def takes(self, facts: ParameterFacts) -> bool:
            return super().takes(facts) and "norm" not in facts.name


@frozen
class TransposesTallMatrices(Polar):
    name: ClassVar[str] = "transposes-tall-matrices"

    class ruled(PolarRule):  # noqa: N801
        def update(self, matrices_Bnm: Tensor) -> Tensor:
            updated = super().update(matrices_Bnm)
            return updated.mT if updated.shape[1] > updated.shape[2] else updated


@frozen
class ReturnsBF16(Polar):
    name: ClassVar[str] = "returns-bf16"

    class ruled(PolarRule):  # noqa: N801
        def update(self, matrices_Bnm: Tensor) -> Tensor:
            return super().update(matrices_Bnm).bfloat16()


@frozen
class DividesByZero(Polar):
    name: ClassVar[str] = "divides-by-zero"

    class ruled(PolarRule):  # noqa: N801
        def update(self, matrices_Bnm: Tensor) -> Tensor:
            return matrices_Bnm / matrices_Bnm.norm(dim=(1, 2), keepdim=True)


@frozen
class RemembersMatrices(Polar):
    """Keeps a mean of its matrices in the rule."""

    name: ClassVar[str] = "remembers-matrices"

    class ruled(PolarRule):  # noqa: N801
        mean: Any = 0.0

        def update(self, matrices_Bnm: Tensor) -> Tensor:
            self.mean = self.mean / 2 + matrices_Bnm.mean(0) / 2
            return super().update(matrices_Bnm + self.mean)


@frozen
class CountsSteps(Polar):
    name: ClassVar[str] = "counts-steps"

    class ruled(PolarRule):  # noqa: N801
        count = 0

        def apply(self, parameter: Tensor, update: Tensor, *, lr: float, shape: tuple[int, int]) -> None:
            self.count += 1
            super().apply(parameter, update, lr=lr, shape=shape)


@frozen
class NormalisesTheBatch(Polar):
    """Mixes the experts of a batch."""

    name: ClassVar[str] = "normalises-the-batch"

    class ruled(PolarRule):  # noqa: N801
        def update(self, matrices_Bnm: Tensor) -> Tensor:
            return matrices_Bnm / matrices_Bnm.norm().clamp(min=1e-30)


@frozen
class CountsPlaces(Polar):
    """The place of a matrix in its batch decides its update."""

    name: ClassVar[str] = "counts-places"

    class ruled(PolarRule):  # noqa: N801
        def update(self, matrices_Bnm: Tensor) -> Tensor:
            places_B11 = torch.arange(len(matrices_Bnm)).view(-1, 1, 1)
            return super().update(matrices_Bnm) * (1 + places_B11)


@frozen
class NormalisesItsPart(Polar):
    name: ClassVar[str] = "normalises-its-part"

    class ruled(PolarRule):  # noqa: N801
        def direction(self, grad: Tensor, states: Mapping[str, Tensor]) -> Tensor:
            return super().direction(grad / grad.norm(), states)


@frozen
class ChangesGradients(Polar):
    name: ClassVar[str] = "changes-gradients"

    class ruled(PolarRule):  # noqa: N801
        def direction(self, grad: Tensor, states: Mapping[str, Tensor]) -> Tensor:
            return grad.add_(super().direction(grad, states))


@frozen
class DrawsDirections(Polar):
    name: ClassVar[str] = "draws-directions"

    class ruled(PolarRule):  # noqa: N801
        def direction(self, grad: Tensor, states: Mapping[str, Tensor]) -> Tensor:
            return super().direction(grad, states) + torch.randn_like(grad)


@frozen
class KeepsMoreStates(Polar):
    name: ClassVar[str] = "keeps-more-states"

    class ruled(PolarRule):  # noqa: N801
        def direction(self, grad: Tensor, states: Any) -> Tensor:
            states["last"] = grad.clone()
            return super().direction(grad, states)


@frozen
class MeasuresItsPart(Polar):
    """Takes the shape of what is stored for that of the matrix."""

    name: ClassVar[str] = "measures-its-part"

    class ruled(PolarRule):  # noqa: N801
        def apply(self, parameter: Tensor, update: Tensor, *, lr: float, shape: tuple[int, int]) -> None:
            rows, columns = parameter.shape
            super().apply(parameter, update, lr=lr, shape=(rows, columns))


@frozen
class HasARateOfItsOwn(Polar):
    name: ClassVar[str] = "has-a-rate-of-its-own"

    class ruled(PolarRule):  # noqa: N801
        def apply(self, parameter: Tensor, update: Tensor, *, lr: float, shape: tuple[int, int]) -> None:
            super().apply(parameter, update, lr=0.01, shape=shape)


@frozen
class DecaysMatricesTwice(Polar):
    name: ClassVar[str] = "decays-matrices-twice"

    class ruled(PolarRule):  # noqa: N801
        def apply(self, parameter: Tensor, update: Tensor, *, lr: float, shape: tuple[int, int]) -> None:
            parameter.mul_(1 - lr * self.decay)
            super().apply(parameter, update, lr=lr, shape=shape)


@frozen
class ClimbsUp(Polar):
    name: ClassVar[str] = "climbs-up"

    class ruled(PolarRule):  # noqa: N801
        def update(self, matrices_Bnm: Tensor) -> Tensor:
            return -super().update(matrices_Bnm)
