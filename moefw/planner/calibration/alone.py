"""What a rank measures without others: products, copies, operators on each value, and what the host takes for one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional as F
from torch.nn.functional import ScalingType

from moefw.planner.calibration.clocks import Call, Clock, HostClock, calls_of_a_repeat, clock_of
from moefw.planner.calibration.readings import Reading, reading
from moefw_kernels.devices import is_gpu

TERA: Final = 1e12
MICRO: Final = 1e-6
FP8_CAPABILITY: Final = (8, 9)
"""The compute capability from which on GPUs multiply fp8."""
DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16}


@frozen(kw_only=True)
class Shape:
    """Of a product of operands ``(rows, depth)`` and ``(columns, depth)``."""

    rows: int
    columns: int
    depth: int

    @property
    def flops(self) -> int:
        """Operations of the product."""
        return 2 * self.rows * self.columns * self.depth


@frozen(kw_only=True)
class Sizes:
    """What is measured. ``shapes``: of products. A copy has ``copied`` bytes, an operand on each value ``operand``.

    ``operators``: those that the host is timed for at once; on a GPU fewer than a stream queues before the host waits.
    """

    shapes: Sequence[Shape]
    copied: int
    operand: int
    operators: int


def _cube(size: int) -> Shape:
    return Shape(rows=size, columns=size, depth=size)


ON_A_CPU: Final = Sizes(
    shapes=(_cube(2048), _cube(1024), _cube(256), Shape(rows=64, columns=512, depth=256)),
    copied=256 << 20,
    operand=64 << 20,
    operators=1000,
)
ON_A_GPU: Final = Sizes(
    shapes=(_cube(8192), _cube(2048), Shape(rows=256, columns=4096, depth=2048)),
    copied=1 << 30,
    operand=256 << 20,
    operators=400,
)
"""The last shape of each is of a few rows, as an expert has them. Copies and operands are larger than caches."""


@frozen(kw_only=True)
class Measurement:
    """A measurement of a rank. ``name``: what it measures, in words; ``unit``: that of its reading, for a line.

    ``read`` returns None if this rank has nothing to measure, and raises RuntimeError where it cannot.
    """

    name: str
    unit: str
    read: Callable[[], Reading | None]


def product_name(format: str, shape: Shape) -> str:
    """Name of the measurement of a product."""
    return f"products of {format}, {shape.rows} x {shape.columns} x {shape.depth}"


def elementwise_name(format: str) -> str:
    """Name of the measurement of an operator on each value."""
    return f"multiplication of values of {format}"


COPY: Final = "copy in memory"
LAUNCH: Final = "an operator"
FORWARD: Final = "an operator that autograd records"
BACKWARD: Final = "an operator of backward"


def formats(device: torch.device) -> list[str]:
    """Formats in which a device multiplies."""
    offers_fp8 = is_gpu(device) and torch.cuda.get_device_capability(device) >= FP8_CAPABILITY
    return [*DTYPES, "fp8"] if offers_fp8 else [*DTYPES]


def measurements(device: torch.device, sizes: Sizes, repeats: int) -> Iterator[Measurement]:
    """Yield the measurements of a device and of its host, in their order."""
    clock = clock_of(device)
    for format in formats(device):
        for shape in sizes.shapes:
            read = partial(_product, clock, device, format, shape, repeats)
            yield Measurement(name=product_name(format, shape), unit="TFLOPS", read=read)
    yield Measurement(name=COPY, unit="TB/s", read=partial(_copy, clock, device, sizes.copied, repeats))
    for format, dtype in DTYPES.items():
        read = partial(_elementwise, clock, device, dtype, sizes.operand, repeats)
        yield Measurement(name=elementwise_name(format), unit="TB/s", read=read)
    host = Operators(clock, device, sizes.operators)
    for name, seconds in ((LAUNCH, host.plain_s), (FORWARD, host.forward_s), (BACKWARD, host.backward_s)):
        read = partial(reading, seconds, figure=lambda taken_s: taken_s / MICRO, repeats=repeats)
        yield Measurement(name=name, unit="us of the host", read=read)


def _timed(clock: Clock, call: Call, amount: float, repeats: int) -> Reading:
    """Reading of ``amount`` over the seconds of a call."""
    times = calls_of_a_repeat(clock, call)
    return reading(lambda: clock.seconds(call, times) / times, figure=lambda taken_s: amount / taken_s, repeats=repeats)


def _product(clock: Clock, device: torch.device, format: str, shape: Shape, repeats: int) -> Reading:
    # Random values: a GPU takes less power for zeros, and is faster.
    x_RD = torch.randn(shape.rows, shape.depth, device=device)
    w_CD = torch.randn(shape.columns, shape.depth, device=device)
    if format == "fp8":
        call: Call = _fp8_product(x_RD, w_CD)
    else:
        dtype = DTYPES[format]
        call = partial(F.linear, x_RD.to(dtype), w_CD.to(dtype))
    return _timed(clock, call, shape.flops / TERA, repeats)


def _fp8_product(x_RD: Tensor, w_CD: Tensor) -> Call:
    """Product in fp8 with one scale for each operand. Its result is in bf16."""
    one = torch.ones((), device=x_RD.device)
    kind = ScalingType.TensorWise
    codes = x_RD.to(torch.float8_e4m3fn)
    codes_of_weight = w_CD.to(torch.float8_e4m3fn)
    return partial(F.scaled_mm, codes, codes_of_weight.mT, one, kind, one, kind, output_dtype=torch.bfloat16)


def _copy(clock: Clock, device: torch.device, nbytes: int, repeats: int) -> Reading:
    source = torch.randn(nbytes // 4, device=device)
    copy = torch.empty_like(source)
    return _timed(clock, lambda: copy.copy_(source), 2 * source.nbytes / TERA, repeats)


def _elementwise(clock: Clock, device: torch.device, dtype: torch.dtype, nbytes: int, repeats: int) -> Reading:
    a = torch.randn(nbytes // dtype.itemsize, device=device).to(dtype)
    b = torch.randn(nbytes // dtype.itemsize, device=device).to(dtype)
    # Two operands are read, and the result is written to memory that the allocator gives.
    return _timed(clock, lambda: a * b, 3 * a.nbytes / TERA, repeats)


class Operators:
    """What the host takes for an operator on a few values, of ``number`` operators one behind the other.

    The device is idle when they begin and has little to do, so the host waits for nothing.
    """

    def __init__(self, clock: Clock, device: torch.device, number: int) -> None:
        self._clock = clock
        self._host = HostClock(device)
        self._number = number
        self._x = torch.ones(16, device=device)
        self._trained = torch.ones(16, device=device, requires_grad=True)

    def plain_s(self) -> float:
        """Seconds of an operator outside autograd."""
        with torch.no_grad():
            self._clock.wait()
            return self._host.seconds(lambda: torch.mul(self._x, self._x), self._number) / self._number

    def forward_s(self) -> float:
        """Seconds of an operator that autograd records."""
        return self._chain()[1]

    def backward_s(self) -> float:
        """Seconds of an operator of backward, with its node."""
        end, _ = self._chain()
        gradient = torch.ones_like(end)
        self._clock.wait()
        return self._host.seconds(lambda: end.backward(gradient), 1) / self._number

    def _chain(self) -> tuple[Tensor, float]:
        """End of a chain of recorded operators, and the seconds of one."""
        value: Tensor = self._trained

        def extend() -> None:
            nonlocal value
            value = torch.mul(value, self._x)

        self._clock.wait()
        seconds = self._host.seconds(extend, self._number)
        return value, seconds / self._number
