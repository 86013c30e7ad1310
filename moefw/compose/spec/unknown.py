"""The value of an option that could not be read, which nothing may be concluded from."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Final, NoReturn

import attrs


class UnknownUsedError(BaseException):
    """Raised by any use of ``UNKNOWN``. No ``Exception``: a plugin that catches those would still answer."""


class Unknown:
    """Type of ``UNKNOWN``: it can be passed on and compared by ``is``, and any other use of it raises."""

    def _refuse(self, *_: object) -> NoReturn:
        raise UnknownUsedError("this value of the spec could not be read")

    __getattr__ = __call__ = _refuse
    __bool__ = __int__ = __float__ = __index__ = __abs__ = __neg__ = __round__ = _refuse
    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = _refuse
    __add__ = __sub__ = __mul__ = __truediv__ = __floordiv__ = __mod__ = __divmod__ = __pow__ = _refuse
    __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __rfloordiv__ = __rmod__ = __rdivmod__ = __rpow__ = _refuse
    __iter__ = __len__ = __contains__ = __getitem__ = _refuse
    __repr__ = __str__ = __format__ = __fspath__ = _refuse


UNKNOWN: Final[Any] = Unknown()
"""In place of a value that could not be read. The problem of that value has been reported."""

_PLAIN: Final = frozenset({str, int, float, bool, type(None)})
"""Types of most values. The question is asked of each value at each layer, for each candidate of a search."""


def is_known(value: object) -> bool:
    """Whether a value holds no ``UNKNOWN``, also inside of lists, mappings and attrs objects."""
    kind: Any = type(value)
    if kind in _PLAIN:
        return True
    if isinstance(value, (tuple, list)):
        return all(map(is_known, value))
    if isinstance(value, Mapping):
        return all(map(is_known, value.values()))
    return value is not UNKNOWN and all(is_known(getattr(value, name)) for name in _attributes(kind))


@cache
def _attributes(kind: Any) -> tuple[str, ...]:
    """Names of the attributes of an attrs class; empty for another."""
    return tuple(field.name for field in attrs.fields(kind)) if attrs.has(kind) else ()
