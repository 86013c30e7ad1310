"""Process state that all code shares and plugins must not change: default dtype, random states and more.

Imports none of the modules that have such state: a module that is not loaded has no state yet.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from attrs import frozen


@frozen(eq=False)
class _Shared:
    """One state of a module. ``key`` makes its value comparable. ``fresh`` gives the value right after the import.

    ``drawn``: drawing random numbers changes it.
    """

    name: str
    module: str
    read: Callable[[Any], Any]
    write: Callable[[Any, Any], Any]
    key: Callable[[Any], Any] = lambda value: value
    fresh: Callable[[Any], Any] | None = None
    drawn: bool = False


_SHARED = (
    _Shared(
        "torch's default dtype",
        "torch",
        lambda torch: torch.get_default_dtype(),
        lambda torch, dtype: torch.set_default_dtype(dtype),
        fresh=lambda torch: torch.float32,
    ),
    _Shared(
        "torch's default device",
        "torch",
        lambda torch: torch.get_default_device(),
        lambda torch, _: torch.set_default_device(None),
        fresh=lambda torch: torch.device("cpu"),
    ),
    _Shared(
        "whether gradients are recorded",
        "torch",
        lambda torch: torch.is_grad_enabled(),
        lambda torch, recorded: torch.set_grad_enabled(recorded),
        fresh=lambda torch: True,
    ),
    _Shared(
        "torch's use of deterministic algorithms",
        "torch",
        lambda torch: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        lambda torch, used: torch.use_deterministic_algorithms(used[0], warn_only=used[1]),
        fresh=lambda torch: (False, False),
    ),
    _Shared(
        "torch's matmul precision",
        "torch",
        lambda torch: torch.get_float32_matmul_precision(),
        lambda torch, precision: torch.set_float32_matmul_precision(precision),
        fresh=lambda torch: "highest",
    ),
    _Shared(
        "torch's number of threads",
        "torch",
        lambda torch: torch.get_num_threads(),
        lambda torch, number: torch.set_num_threads(number),
    ),
    _Shared(
        "torch's random state",
        "torch",
        lambda torch: torch.get_rng_state(),
        lambda torch, state: torch.set_rng_state(state),
        key=lambda state: state.numpy().tobytes(),
        drawn=True,
    ),
    _Shared(
        "torch's random state on the GPU",
        "torch.cuda",
        lambda cuda: cuda.get_rng_state() if cuda.is_initialized() else None,
        lambda cuda, state: cuda.set_rng_state(state),
        key=lambda state: state.numpy().tobytes(),
        drawn=True,
    ),
    _Shared(
        "numpy's random state",
        "numpy.random",
        lambda random: random.get_state(),
        lambda random, state: random.set_state(state),
        key=lambda state: (state[1].tobytes(), *state[2:]),
        drawn=True,
    ),
    _Shared(
        "the state of the module random",
        "random",
        lambda random: random.getstate(),
        lambda random, state: random.setstate(state),
        drawn=True,
    ),
)


@contextmanager
def kept(blame: Callable[[str], Exception], *, draws: bool = False) -> Iterator[None]:
    """Restore state that changes inside the context, and raise ``blame("it changes ..., which is put back.")``.

    ``draws``: random numbers may be drawn, as modules do when they are built. No part of a run depends on them.
    """
    before = {
        each: each.read(sys.modules[each.module])
        for each in _SHARED
        if each.module in sys.modules and not (draws and each.drawn)
    }
    try:
        yield
    except BaseException:
        _put_back(before)
        raise
    changed = _put_back(before)
    if changed:
        raise blame(f"it changes {' and '.join(changed)}, which is put back.")


def _put_back(before: Mapping[_Shared, Any]) -> list[str]:
    changed = []
    for each in _SHARED:
        module = sys.modules.get(each.module)
        if module is None or (each not in before and each.fresh is None):
            continue
        value = before[each] if each in before else each.fresh(module)  # type: ignore[misc]
        if value is not None and each.key(each.read(module)) != each.key(value):
            each.write(module, value)
            changed.append(each.name)
    return changed
