"""What a rank measures without others: products, attention, copies, passes, and what the host takes for an operator.

On a GPU also the link to its host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle
from typing import Final

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional as F
from torch.nn.functional import ScalingType

from moefw.planner.calibration.clocks import Call, Clock, HostClock, calls_of_a_repeat, clock_of
from moefw.planner.calibration.readings import Reading, reading
from moefw_kernels.add_wgrad import add_wgrad
from moefw_kernels.devices import is_gpu

TERA: Final = 1e12
GIGA: Final = 1e9
MICRO: Final = 1e-6
APART: Final = 32 << 20
"""Bytes of operands that are taken in turn, so that they come from memory."""
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

    @property
    def nbytes(self) -> int:
        """Bytes of the operands in fp32."""
        return 4 * self.depth * (self.rows + self.columns)

    def of_input_gradient(self) -> Shape:
        """Shape of the gradient of the input of this product: it sums over the columns."""
        return Shape(rows=self.rows, columns=self.depth, depth=self.columns)

    def of_gradient(self) -> Shape:
        """Shape of the gradient of the weight of this product: it sums over the rows."""
        return Shape(rows=self.columns, columns=self.depth, depth=self.rows)


@frozen(kw_only=True)
class Heads:
    """Of causal attention: ``heads`` of ``width`` of each of so many ``sequences`` of ``keys`` tokens."""

    sequences: int
    heads: int
    keys: int
    width: int


@frozen(kw_only=True)
class Sizes:
    """What is measured. ``shapes``: of products; ``heads``: of attention. A copy has ``copied`` bytes.

    ``shapes_of_dgrads``: of products whose gradients of inputs are timed.
    ``spread``: bytes of the operands that calls of a product take in turn: other work of a layer lies between two uses.
    ``operands``: bytes of the tensors of passes. ``operators``: those that the host is timed for at once; on a GPU
    fewer than a stream queues before the host waits.
    """

    shapes: Sequence[Shape]
    shapes_of_dgrads: Sequence[Shape]
    heads: Sequence[Heads]
    spread: int
    copied: int
    operands: Sequence[int]
    operators: int


def _cube(size: int) -> Shape:
    return Shape(rows=size, columns=size, depth=size)


SMALL_SHAPES: Final = (
    _cube(256),
    _cube(32),
    Shape(rows=64, columns=512, depth=256),
    Shape(rows=8, columns=512, depth=512),
)
ON_A_CPU: Final = Sizes(
    shapes=(_cube(2048), *SMALL_SHAPES),
    # In bf16 they take six times as long as forward on a processor that does not multiply bf16: a large one, minutes.
    shapes_of_dgrads=SMALL_SHAPES,
    heads=(Heads(sequences=4, heads=4, keys=256, width=16), Heads(sequences=4, heads=4, keys=256, width=64)),
    spread=APART,
    copied=256 << 20,
    operands=(64 << 10, 1 << 20, 8 << 20, 64 << 20),
    operators=1000,
)
SHAPES_OF_A_GPU: Final = (_cube(8192), _cube(2048), Shape(rows=256, columns=4096, depth=2048))
ON_A_GPU: Final = Sizes(
    shapes=SHAPES_OF_A_GPU,
    shapes_of_dgrads=SHAPES_OF_A_GPU,
    heads=(Heads(sequences=2, heads=16, keys=4096, width=64), Heads(sequences=2, heads=16, keys=4096, width=128)),
    spread=0,
    copied=1 << 30,
    operands=(4 << 20, 256 << 20),
    operators=400,
)
"""The last shape of each is of a few rows, as an expert has them. Copies and the last operands are beyond caches."""


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


def dgrad_name(format: str, shape: Shape) -> str:
    """Name of the measurement of a gradient of inputs."""
    return f"gradients of inputs, {product_name(format, shape)}"


def wgrad_name(format: str, shape: Shape) -> str:
    """Name of the measurement of a gradient of weights."""
    return f"gradients of weights, {product_name(format, shape)}"


def attention_name(format: str, heads: Heads, phase: str) -> str:
    """Name of the measurement of attention in ``forward`` or ``backward``."""
    of = f"{heads.sequences} x {heads.heads} heads of {heads.width}, {heads.keys} tokens"
    return f"attention of {format}, {phase}, {of}"


def pass_name(nbytes: int) -> str:
    """Name of the measurement of passes over tensors of so many bytes."""
    return f"passes over {nbytes >> 10} KiB"


PHASES: Final = ("forward", "backward")
PRODUCTS_OF_ATTENTION: Final = {"forward": 2, "backward": 5}
ROW: Final = 256
"""Values of a row of the tensors that passes read."""
COPY: Final = "copy in memory"
TO_HOST: Final = "copies to the host"
FROM_HOST: Final = "copies from the host"
SMALL_TO_HOST: Final = "a small copy to the host"
HOST_COPY: Final = "copy in the host's memory"
OFFLOADED: Final = 256 << 20
"""Bytes of a large copy between a GPU and its host."""
SMALL_COPY: Final = 64
"""Bytes of a small one."""
LAUNCH: Final = "an operator"
FORWARD: Final = "an operator that autograd records"
BACKWARD: Final = "an operator of backward"
LAYER: Final = "an operator in a layer"
STEP: Final = "a step beside its passes"
LAYER_OF_RANKS: Final = f"{LAYER} of ranks that train together"
STEP_OF_RANKS: Final = f"{STEP}, of ranks that train together"
OPERATORS_OF_PASSES: Final = 5
BETWEEN: Final = Shape(rows=512, columns=256, depth=256)
TIMES_BETWEEN: Final = 3
"""Products, and passes over their rows, between two collectives: 2 to 3 ms of a core."""


def formats(device: torch.device) -> list[str]:
    """Formats in which a device multiplies."""
    offers_fp8 = is_gpu(device) and torch.cuda.get_device_capability(device) >= FP8_CAPABILITY
    return [*DTYPES, "fp8"] if offers_fp8 else [*DTYPES]


def measurements(device: torch.device, sizes: Sizes, repeats: int) -> Iterator[Measurement]:
    """Yield the measurements of a device and of its host, in their order."""
    clock = clock_of(device)
    for format in formats(device):
        for shape in sizes.shapes:
            read = partial(_product, clock, device, format, shape, sizes.spread, repeats)
            yield Measurement(name=product_name(format, shape), unit="TFLOPS", read=read)
    for format, dtype in DTYPES.items():
        for shape in map(Shape.of_input_gradient, sizes.shapes_of_dgrads):
            read = partial(_dgrad, clock, device, dtype, shape, sizes.spread, repeats)
            yield Measurement(name=dgrad_name(format, shape), unit="TFLOPS", read=read)
    for format, dtype in DTYPES.items():
        for shape in map(Shape.of_gradient, sizes.shapes):
            read = partial(_wgrad, clock, device, dtype, shape, sizes.spread, repeats)
            yield Measurement(name=wgrad_name(format, shape), unit="TFLOPS", read=read)
    for format, dtype in DTYPES.items():
        for heads in sizes.heads:
            for phase in PHASES:
                read = partial(_attention, clock, device, dtype, heads, phase, repeats)
                yield Measurement(name=attention_name(format, heads, phase), unit="TFLOPS", read=read)
    yield Measurement(name=COPY, unit="TB/s", read=partial(_copy, clock, device, sizes.copied, repeats))
    for nbytes in sizes.operands:
        yield Measurement(name=pass_name(nbytes), unit="TB/s", read=partial(_passes, clock, device, nbytes, repeats))
    if is_gpu(device):
        yield from of_host_link(clock, device, OFFLOADED, repeats)
    host = Operators(clock, device, sizes.operators)
    for name, seconds in ((LAUNCH, host.plain_s), (FORWARD, host.forward_s), (BACKWARD, host.backward_s)):
        read = partial(reading, seconds, figure=lambda taken_s: taken_s / MICRO, repeats=repeats)
        yield Measurement(name=name, unit="us of the host", read=read)


def _timed(clock: Clock, call: Call, amount: float, repeats: int) -> Reading:
    """Reading of ``amount`` over the seconds of a call."""
    times = calls_of_a_repeat(clock, call)
    return reading(lambda: clock.seconds(call, times) / times, figure=lambda taken_s: amount / taken_s, repeats=repeats)


def _product(clock: Clock, device: torch.device, format: str, shape: Shape, spread: int, repeats: int) -> Reading:
    calls = cycle([_call(device, format, shape) for _ in range(max(1, spread // shape.nbytes))])
    return _timed(clock, lambda: next(calls)(), shape.flops / TERA, repeats)


def _call(device: torch.device, format: str, shape: Shape) -> Call:
    """A product of operands of its own."""
    # Random values: a GPU takes less power for zeros, and is faster.
    x_RD = torch.randn(shape.rows, shape.depth, device=device)
    w_CD = torch.randn(shape.columns, shape.depth, device=device)
    if format == "fp8":
        return _fp8_product(x_RD, w_CD)
    dtype = DTYPES[format]
    return partial(F.linear, x_RD.to(dtype), w_CD.to(dtype))


def _dgrad(clock: Clock, device: torch.device, dtype: torch.dtype, shape: Shape, spread: int, repeats: int) -> Reading:
    """Reading of a product with a weight as it lies in memory. Forward's is with its transpose."""

    def call() -> Call:
        grad_RO = torch.randn(shape.rows, shape.depth, device=device).to(dtype)
        w_OI = torch.randn(shape.depth, shape.columns, device=device).to(dtype)
        return partial(torch.matmul, grad_RO, w_OI)

    calls = cycle([call() for _ in range(max(1, spread // shape.nbytes))])
    return _timed(clock, lambda: next(calls)(), shape.flops / TERA, repeats)


def _wgrad(clock: Clock, device: torch.device, dtype: torch.dtype, shape: Shape, spread: int, repeats: int) -> Reading:
    """Reading of a product that is added to a sum in fp32, as micro-batches add up gradients."""

    def call() -> Call:
        main_OI = torch.zeros(shape.rows, shape.columns, device=device)
        grad_RO = torch.randn(shape.depth, shape.rows, device=device).to(dtype)
        x_RI = torch.randn(shape.depth, shape.columns, device=device).to(dtype)
        return partial(add_wgrad, main_OI, grad_RO, x_RI, None, fresh=False)

    nbytes = shape.nbytes + 4 * shape.rows * shape.columns
    calls = cycle([call() for _ in range(max(1, spread // nbytes))])
    return _timed(clock, lambda: next(calls)(), shape.flops / TERA, repeats)


def _fp8_product(x_RD: Tensor, w_CD: Tensor) -> Call:
    """Product in fp8 with one scale for each operand. Its result is in bf16."""
    one = torch.ones((), device=x_RD.device)
    kind = ScalingType.TensorWise
    codes = x_RD.to(torch.float8_e4m3fn)
    codes_of_weight = w_CD.to(torch.float8_e4m3fn)
    return partial(F.scaled_mm, codes, codes_of_weight.mT, one, kind, one, kind, output_dtype=torch.bfloat16)


def _copy(clock: Clock, device: torch.device, nbytes: int, repeats: int, unit: float = TERA) -> Reading:
    source = torch.randn(nbytes // 4, device=device)
    copy = torch.empty_like(source)
    return _timed(clock, lambda: copy.copy_(source), 2 * source.nbytes / unit, repeats)


def of_host_link(clock: Clock, device: torch.device, nbytes: int, repeats: int) -> Iterator[Measurement]:
    """Yield the measurements of the link between a GPU and page-locked memory of its host, and of the host's memory."""
    for name, out in ((TO_HOST, True), (FROM_HOST, False)):
        read = partial(_host_copy, clock, device, nbytes, repeats, out=out)
        yield Measurement(name=name, unit="GB/s", read=read)
    yield Measurement(name=SMALL_TO_HOST, unit="us", read=partial(_small_host_copy, clock, device, repeats))
    in_memory = partial(_copy, HostClock(device), torch.device("cpu"), nbytes, repeats, unit=GIGA)
    yield Measurement(name=HOST_COPY, unit="GB/s", read=in_memory)


def _host_copy(clock: Clock, device: torch.device, nbytes: int, repeats: int, *, out: bool) -> Reading:
    copy, copied = _call_of_host_copy(device, nbytes, out=out)
    return _timed(clock, copy, copied / GIGA, repeats)


def _small_host_copy(clock: Clock, device: torch.device, repeats: int) -> Reading:
    copy, _ = _call_of_host_copy(device, SMALL_COPY, out=True)
    times = calls_of_a_repeat(clock, copy)
    seconds = partial(clock.seconds, copy, times)
    return reading(seconds, figure=lambda taken_s: taken_s / times / MICRO, repeats=repeats)


def _call_of_host_copy(device: torch.device, nbytes: int, *, out: bool) -> tuple[Call, int]:
    """A copy of ``nbytes`` to the host, or from it, and its bytes."""
    on_device = torch.zeros(nbytes // 4, device=device)
    on_host = torch.zeros(nbytes // 4, pin_memory=is_gpu(device))
    target, source = (on_host, on_device) if out else (on_device, on_host)
    return partial(target.copy_, source, non_blocking=True), source.nbytes


def _passes(clock: Clock, device: torch.device, nbytes: int, repeats: int) -> Reading:
    """Reading of the operators between products in a layer: each on tensors of fp32 of ``nbytes``."""
    return _timed(clock, _passes_of_a_layer(device, nbytes), bytes_of_passes(nbytes) / TERA, repeats)


def _passes_of_a_layer(device: torch.device, nbytes: int) -> Call:
    rows_RD = torch.randn(nbytes // (4 * ROW), ROW, device=device)
    others_RD = torch.randn_like(rows_RD)
    order_R = torch.randperm(len(rows_RD), device=device)

    def layer() -> None:  # results are written to memory that the allocator gives
        torch.mul(rows_RD, others_RD)
        F.silu(rows_RD)
        torch.index_select(rows_RD, 0, order_R)
        rows_RD.to(torch.bfloat16)
        torch.sum(rows_RD, dim=1)

    return layer


def work_of_a_layer(device: torch.device) -> Call:
    """Work as between two collectives of a layer: products with weights that lie apart, and passes over their rows."""
    products = cycle([_call(device, "fp32", BETWEEN) for _ in range(APART // BETWEEN.nbytes)])
    passes = _passes_of_a_layer(device, 4 * BETWEEN.rows * BETWEEN.columns)

    def work() -> None:
        for _ in range(TIMES_BETWEEN):
            next(products)()
            passes()

    return work


def bytes_of_passes(nbytes: int) -> int:
    """Bytes that the operators of a measurement of passes read and write together, without orders and sums of rows."""
    read = (2 + 1 + 1 + 1 + 1) * nbytes
    written = (1 + 1 + 1) * nbytes + nbytes // 2
    return read + written


def _attention(
    clock: Clock, device: torch.device, dtype: torch.dtype, heads: Heads, phase: str, repeats: int
) -> Reading:
    """Reading of the core of attention, of the operations that a plan counts."""
    shape = heads.sequences, heads.heads, heads.keys, heads.width
    query, key, value = (torch.randn(shape, device=device).to(dtype).requires_grad_() for _ in range(3))
    seen = heads.sequences * heads.heads * heads.keys * (heads.keys + 1) // 2

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    out = forward()
    gradient = torch.randn_like(out)
    calls: dict[str, Call] = {
        "forward": forward,
        "backward": lambda: torch.autograd.grad(out, (query, key, value), gradient, retain_graph=True),
    }
    flops = 2 * PRODUCTS_OF_ATTENTION[phase] * heads.width * seen
    return _timed(clock, calls[phase], flops / TERA, repeats)


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
