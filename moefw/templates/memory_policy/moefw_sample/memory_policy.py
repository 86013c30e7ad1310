"""The runtime part of ``sample``."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, final

import moefw
from moefw.runtime.memory.dropped import Packed, stand_in, stay, unpack
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


@final
class SamplePolicy(moefw.MemoryPolicy):
    """Handles each tensor when it is saved and again when backward needs it: the place to move or to pack it."""

    def wrap(self, region: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` with its saved tensors treated. Values and gradients stay the same bits."""

        @wraps(function)
        def treated(*args: Any, **kwargs: Any) -> Any:
            with saved_tensors_hooks(_pack, _unpack):
                return function(*args, **kwargs)

        return treated


def _pack(saved: Tensor) -> Tensor | Packed:
    """Object to hold until backward. Parameters that an operation saves also arrive here.

    ``stand_in`` comes first: it replaces a tensor that a region inside this one computes again.
    """
    return stand_in(saved) or stay(saved)


def _unpack(held: Tensor | Packed) -> Tensor:
    """Tensor that was saved, bit for bit."""
    return unpack(held)
