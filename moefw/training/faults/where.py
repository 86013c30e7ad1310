"""The collective that a thread waits in, read from its Python frames without its help."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator
from itertools import takewhile
from types import FrameType
from typing import Any, Final

from moefw.training.faults.blame import in_words

_COLLECTIVES: Final = "/torch/distributed/"


def waits_in(thread: int) -> str:
    """``all_reduce of ranks 0 and 1``, or an empty string if the thread does something else.

    Autograd runs backward on a GPU in its own threads: if ``thread`` is in backward, their frames are read.
    """
    frames = sys._current_frames()
    innermost = frames.pop(thread, None)
    if innermost is None:
        return ""
    if innermost.f_code.co_name == "_engine_run_backward":
        in_backward = (frame for frame in frames.values() if any("autograd" in name for name in _names(frame)))
        return next(filter(None, map(_collective, in_backward)), "")
    return _collective(innermost)


def _collective(innermost: FrameType) -> str:
    distributed: Any = sys.modules.get("torch.distributed")
    if not hasattr(distributed, "is_initialized"):
        return ""  # not imported, or just being imported
    frames = list(_outwards(innermost))
    name = _name(frames, distributed)
    if not name or not distributed.is_initialized():
        return name
    ranks = next(filter(None, (_ranks(frame, distributed) for frame in frames)), None)
    return f"{name}{f' of {in_words(ranks)}' if ranks else ''}"


def _name(frames: list[FrameType], distributed: Any) -> str:
    """Function through which torch was called, or the operation of a work that is waited for."""
    code = frames[0].f_code
    if _COLLECTIVES in code.co_filename:
        same_file = takewhile(lambda frame: frame.f_code.co_filename == code.co_filename, frames)
        return [frame.f_code.co_name for frame in same_file][-1]
    if ".wait(" not in linecache.getline(code.co_filename, frames[0].f_lineno or 0):
        return ""
    for value in frames[0].f_locals.values():
        if isinstance(value, distributed.Work):
            operations: Any = sys.modules["torch._C._distributed_c10d"]
            return str(operations.OpType(value._get_op_type()).name).lower()
        if isinstance(value, distributed.Store):
            return code.co_name
    return ""


def _ranks(frame: FrameType, distributed: Any) -> list[int] | None:
    """Ranks of the process group that a function was given, or that its object has."""
    group = frame.f_locals.get("group", getattr(frame.f_locals.get("self"), "group", None))
    if group is None and "group" in frame.f_locals and _COLLECTIVES in frame.f_code.co_filename:
        group = distributed.group.WORLD  # what None means to torch's own functions
    return list(distributed.get_process_group_ranks(group)) if isinstance(group, distributed.ProcessGroup) else None


def _outwards(innermost: FrameType) -> Iterator[FrameType]:
    frame: FrameType | None = innermost
    while frame is not None:
        yield frame
        frame = frame.f_back


def _names(frame: FrameType) -> Iterator[str]:
    return (each.f_code.co_filename for each in _outwards(frame))
