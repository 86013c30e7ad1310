"""An elementwise optimizer that keeps its contract, and optimizers that break it in one way each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from attrs import frozen
from torch import Tensor, nn

import moefw
from moefw.core.plugin import OPTIMIZER, OptimizerPlugin
from moefw.core.records import TrainedParameters
from moefw.core.site import Site


class Momentum(torch.optim.Optimizer):
    """Follows a running sum of gradients."""

    key: ClassVar[str] = "momentum"
    beta: ClassVar[float] = 0.9

    def __init__(self, parameters: Sequence[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.first_lr = lr

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, group["lr"], self.state[parameter])

    def begin(self, parameter: Tensor) -> Tensor:
        return torch.zeros_like(parameter)

    def update(self, parameter: Tensor, lr: float, state: dict[str, Tensor]) -> None:
        if self.key not in state:
            state[self.key] = self.begin(parameter)
        state[self.key].mul_(self.beta).add_(parameter.grad)
        parameter.add_(state[self.key], alpha=-lr)


@frozen
class Sound(OptimizerPlugin):
    """Right in every way. Those below change it."""

    name: ClassVar[str] = "sound"
    built: ClassVar[type[Momentum]] = Momentum

    def offers(self, site: Site) -> moefw.Offers:
        return moefw.offers(update=("elementwise",), region=((OPTIMIZER, "offload"),))

    def states(self) -> Sequence[str]:
        return ("momentum",)

    def build(self, parameters: TrainedParameters, lr: float) -> Any:
        return self.built(list(parameters.values()), lr)


@frozen
class NeedsAClosure(Sound):
    name: ClassVar[str] = "needs-a-closure"

    class built(Momentum):  # noqa: N801
        def step(self, closure: Any) -> None:
            super().step(closure)


@frozen
class BuildsNoOptimizer(Sound):
    name: ClassVar[str] = "builds-no-optimizer"

    def build(self, parameters: TrainedParameters, lr: float) -> Any:
        return None


@frozen
class MisspellsItsOffer(Sound):
    name: ClassVar[str] = "misspells-its-offer"

    def offers(self, site: Site) -> moefw.Offers:
        return moefw.offers(update=("elementwise",), region=((OPTIMIZER, "ofload"),))


@frozen
class DecaysPlainMatricesAlone(Sound):
    """Forgets stacks of experts, which have three dimensions."""

    name: ClassVar[str] = "decays-plain-matrices-alone"

    class built(Momentum):  # noqa: N801
        def update(self, parameter: Tensor, lr: float, state: dict[str, Tensor]) -> None:
            if parameter.dim() == 2:
                parameter.mul_(1 - 0.1 * lr)
            super().update(parameter, lr, state)


@frozen
class LeavesOutNorms(Sound):
    name: ClassVar[str] = "leaves-out-norms"

    def build(self, parameters: TrainedParameters, lr: float) -> Any:
        return self.built([each for name, each in parameters.items() if "norm" not in name], lr)


@frozen
class GoesUp(Sound):
    name: ClassVar[str] = "goes-up"

    class built(Momentum):  # noqa: N801
        def update(self, parameter: Tensor, lr: float, state: dict[str, Tensor]) -> None:
            super().update(parameter, -lr, state)


@frozen
class KeepsItsRate(Sound):
    name: ClassVar[str] = "keeps-its-rate"

    class built(Momentum):  # noqa: N801
        def update(self, parameter: Tensor, lr: float, state: dict[str, Tensor]) -> None:
            super().update(parameter, self.first_lr, state)


@frozen
class NeedsEveryGradient(Sound):
    name: ClassVar[str] = "needs-every-gradient"

    class built(Momentum):  # noqa: N801
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.update(parameter, group["lr"], self.state[parameter])


@frozen
class DrawsNoise(Sound):
    name: ClassVar[str] = "draws-noise"

    class built(Momentum):  # noqa: N801
        def update(self, parameter: Tensor, lr: float, state: dict[str, Tensor]) -> None:
            super().update(parameter, lr, state)
            parameter.add_(torch.randn_like(parameter), alpha=lr)


@frozen
class NamesAnotherState(Sound):
    name: ClassVar[str] = "names-another-state"

    def states(self) -> Sequence[str]:
        return ("velocity",)


@frozen
class SaysNothingIsBelowZero(Sound):
    name: ClassVar[str] = "says-nothing-is-below-zero"

    def nonnegative_states(self) -> Sequence[str]:
        return ("momentum",)


@frozen
class KeepsBF16(Sound):
    name: ClassVar[str] = "keeps-bf16"

    class built(Momentum):  # noqa: N801
        def begin(self, parameter: Tensor) -> Tensor:
            return torch.zeros_like(parameter, dtype=torch.bfloat16)


@frozen
class CountsForItself(Sound):
    """Its beta depends on a count that no checkpoint holds."""

    name: ClassVar[str] = "counts-for-itself"

    class built(Momentum):  # noqa: N801
        count = 0

        def step(self, closure: Any = None) -> None:
            self.count += 1
            self.beta = 1 - 1 / (1 + self.count)  # type: ignore[misc]
            super().step()


@frozen
class ScalesByTheNorm(Sound):
    """Its update looks at the whole parameter, and says that rows may be updated alone."""

    name: ClassVar[str] = "scales-by-the-norm"

    class built(Momentum):  # noqa: N801
        def update(self, parameter: Tensor, lr: float, state: dict[str, Tensor]) -> None:
            super().update(parameter, lr / float(parameter.grad.norm()), state)


@frozen
class BeginsAtTheGradient(Sound):
    name: ClassVar[str] = "begins-at-the-gradient"

    class built(Momentum):  # noqa: N801
        def begin(self, parameter: Tensor) -> Tensor:
            return parameter.grad.clone()


@frozen
class SaysNothing(Sound):
    name: ClassVar[str] = "says-nothing"

    def offers(self, site: Site) -> moefw.Offers:
        return moefw.offers()


@frozen
class DecaysTwice(Sound):
    """Takes its decay off before and after the update."""

    name: ClassVar[str] = "decays-twice"

    class built(Momentum):  # noqa: N801
        def __init__(self, parameters: Sequence[nn.Parameter], lr: float) -> None:
            super().__init__([{"params": parameters, "weight_decay": 0.1}], lr)

        def update(self, parameter: Tensor, lr: float, state: dict[str, Tensor]) -> None:
            parameter.mul_(1 - lr * 0.1)
            super().update(parameter, lr, state)
            parameter.mul_(1 - lr * 0.1)


@frozen
class ReadsNames(Sound):
    """Halves the learning rate of what is called a norm."""

    name: ClassVar[str] = "reads-names"

    def build(self, parameters: TrainedParameters, lr: float) -> Any:
        rates = {name: lr / 2 if "norm" in name else lr for name in parameters}
        return self.built([{"params": [each], "lr": rates[name]} for name, each in parameters.items()], lr)


@frozen
class ClipsAllTogether(Sound):
    """Scales by the norm of the gradients of all parameters of its rank."""

    name: ClassVar[str] = "clips-all-together"

    class built(Momentum):  # noqa: N801
        def step(self, closure: Any = None) -> None:
            parameters = [each for group in self.param_groups for each in group["params"] if each.grad is not None]
            norm = sum(float(each.grad.square().sum()) for each in parameters) ** 0.5
            for each in parameters:
                each.grad = each.grad / norm
            super().step()


class Directed(Momentum):
    """Follows what ``direction`` makes of each gradient."""

    def update(self, parameter: Tensor, lr: float, state: dict[str, Tensor]) -> None:
        before = parameter.grad
        parameter.grad = self.direction(before)
        super().update(parameter, lr, state)
        parameter.grad = before

    def direction(self, grad: Tensor) -> Tensor:
        raise NotImplementedError


def orthogonal(matrices: Tensor) -> Tensor:
    """Nearest orthogonal matrices, of the last two dimensions."""
    u, _, vh = torch.linalg.svd(matrices, full_matrices=False)
    return u @ vh


@frozen
class NormalisesColumns(Sound):
    """Its rows depend on the other rows."""

    name: ClassVar[str] = "normalises-columns"

    class built(Directed):  # noqa: N801
        def direction(self, grad: Tensor) -> Tensor:
            return grad / grad.norm(dim=-2, keepdim=True) if grad.dim() > 1 else grad


@frozen
class NormalisesRows(Sound):
    """Rows alone are right, and columns alone are not."""

    name: ClassVar[str] = "normalises-rows"

    class built(Directed):  # noqa: N801
        def direction(self, grad: Tensor) -> Tensor:
            return grad / grad.norm(dim=-1, keepdim=True) if grad.dim() > 1 else grad


@frozen
class TakesPartsForWhole(Sound):
    """Muon of every two-dimensional parameter, whatever part of a matrix it is."""

    name: ClassVar[str] = "takes-parts-for-whole"

    class built(Directed):  # noqa: N801
        def direction(self, grad: Tensor) -> Tensor:
            return orthogonal(grad) if grad.dim() == 2 else grad


@frozen
class TakesGateAndUpTogether(Sound):
    """Muon of a stack, each expert's gate and up as one matrix."""

    name: ClassVar[str] = "takes-gate-and-up-together"

    class built(Directed):  # noqa: N801
        def direction(self, grad: Tensor) -> Tensor:
            return orthogonal(grad) if grad.dim() == 3 else grad


@frozen
class MixesExperts(Sound):
    """Muon of a stack, all experts as one matrix."""

    name: ClassVar[str] = "mixes-experts"

    class built(Directed):  # noqa: N801
        def direction(self, grad: Tensor) -> Tensor:
            return orthogonal(grad.flatten(0, 1)).view_as(grad) if grad.dim() == 3 else grad


@frozen
class DrawsFromASeed(Sound):
    """Draws the same noise at every run, and other noise for a part."""

    name: ClassVar[str] = "draws-from-a-seed"

    class built(Directed):  # noqa: N801
        def direction(self, grad: Tensor) -> Tensor:
            return grad + torch.randn(grad.shape, generator=torch.Generator().manual_seed(0))
