"""Units of FSDP by their stage of ZeRO, and the block of a step in which those of 1 and 2 keep gathered weights.

=====  ===============================  ==========================================================================
stage  weights are gathered             gradients are reduced
=====  ===============================  ==========================================================================
3      for each pass through a unit     after each micro-batch
2      at the first use in a step       after each micro-batch
1      at the first use in a step       once a step: :mod:`moefw.runtime.parallel.unsharded_gradients` adds them up
=====  ===============================  ==========================================================================

No copy outlives the block, which ends before weights change: so none can be stale, and none adds to the memory of the
update. Outside of a block every unit gathers for each pass. Importing this takes a second, so only models that FSDP
shards import it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final
from weakref import WeakKeyDictionary

from torch import nn
from torch.distributed.fsdp import FSDPModule

from moefw.core.records import Zero

_zeros: Final[WeakKeyDictionary[nn.Module, Zero]] = WeakKeyDictionary()
"""The stage of each unit, by identity. FSDP2 has no place for it, and the unit's module is somebody else's."""


def remember(unit: nn.Module, zero: Zero) -> None:
    """Let a unit be of a stage of ZeRO."""
    _zeros[unit] = zero


def zero_of(unit: nn.Module) -> Zero:
    """Stage of ZeRO of a unit; 3 of one that somebody else has made, which FSDP gathers and reduces as ever."""
    return _zeros.get(unit, 3)


def units(model: nn.Module, *zeros: Zero) -> list[Any]:
    """Units of a model of these stages of ZeRO, or all if none is given."""
    of_model = [module for module in model.modules() if isinstance(module, FSDPModule)]
    return [unit for unit in of_model if not zeros or zero_of(unit) in zeros]


def roots(model: Any) -> list[Any]:
    """Units that are in no other one: the model itself, if ranks shard its dense parameters, or its experts.

    FSDP takes the first module that is called for the root, unless this was called before.
    """
    of_model = [model] if isinstance(model, FSDPModule) else units(model)
    for unit in of_model:
        unit._get_fsdp_state()._lazy_init()  # modules come behind those that they are in
    return [unit for unit in of_model if unit._get_fsdp_state()._is_root]


@contextmanager
def kept(model: nn.Module) -> Iterator[None]:
    """Block in which units of ZeRO 1 and 2 keep their gathered weights from first use on. These must not change in it.

    It is left between passes.
    """
    roots(model)
    keeping = units(model, 1, 2)
    for unit in keeping:
        unit.set_reshard_after_forward(False, recurse=False)
        unit.set_reshard_after_backward(False, recurse=False)
    try:
        yield
    finally:
        for unit in keeping:
            unit.set_reshard_after_forward(True, recurse=False)
            unit.set_reshard_after_backward(True, recurse=False)
            unit.reshard()


def sharded_parameters(model: nn.Module, *zeros: Zero) -> set[nn.Parameter]:
    """Parameters that the units of these stages of ZeRO store, each this rank's shard, gathered or not."""
    return {fsdp_param.sharded_param for unit in units(model, *zeros) for fsdp_param in fsdp_params(unit)}


def fsdp_params(unit: Any) -> list[Any]:
    """FSDP2's private records of the parameters of a unit."""
    group = unit._get_fsdp_state()._fsdp_param_group
    return [] if group is None else group.fsdp_params
