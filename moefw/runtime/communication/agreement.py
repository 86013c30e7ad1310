"""Exchange of control data between ranks: JSON over a process group, never pickled objects.

``all_gather_object`` would unpickle, and so could execute, whatever a peer sends.
"""

from __future__ import annotations

import json
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from moefw.core.errors import DamagedDataError, MoefwError, Problem, RunError

MAX_BYTES: Final = 1 << 30
"""Size limit of one answer. A checkpoint's list of tensors has a few hundred bytes for each tensor."""


def everywhere(answer: Any, group: ProcessGroup | None) -> list[Any]:
    """Return the answers of all ranks of the group, in rank order. ``group`` None: this rank alone. Collective.

    ``answer`` must be JSON-serializable. It travels on the CPU over gloo, and on the GPU over NCCL. Raises RunError if
    a rank sends something other than JSON.
    """
    if group is None:
        return [answer]
    device = torch.device("cpu" if "gloo" in dist.get_backend(group) else "cuda")
    own = torch.frombuffer(bytearray(json.dumps(answer).encode()), dtype=torch.uint8).to(device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(group.size())]
    dist.all_gather(sizes, torch.tensor([own.numel()], device=device), group=group)
    lengths = [int(size) for size in sizes]
    wrong = [rank for rank, length in enumerate(lengths) if not 0 < length <= MAX_BYTES]
    if wrong:
        raise _no_answer(wrong[0], f"announces {lengths[wrong[0]]} bytes")
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    padded[: own.numel()] = own
    sent = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(sent, padded, group=group)
    return [_read(rank, data[:length]) for rank, (data, length) in enumerate(zip(sent, lengths, strict=True))]


def anywhere(answer: bool, group: ProcessGroup | None) -> bool:
    """Return whether ``answer`` is True on any rank of a host group. ``group`` None: this rank alone. Collective."""
    if group is None:
        return answer
    found = torch.tensor([int(answer)])
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return bool(found)


def raise_together(error: MoefwError | None, group: ProcessGroup | None) -> None:
    """Raise the error of the first rank that has one, on every rank; do nothing if none has one. Collective."""
    own = None if error is None else [type(error).__name__, [[p.what, p.fix, p.where] for p in error.problems]]
    found = next((answer for answer in everywhere(own, group) if answer is not None), None)
    if error is not None and found == own:
        raise error
    if found is not None:
        name, problems = found
        kinds = {kind.__name__: kind for kind in (*MoefwError.__subclasses__(), DamagedDataError)}
        raise kinds.get(name, RunError)([Problem(*map(str, problem)) for problem in problems])


def _read(rank: int, data: torch.Tensor) -> Any:
    try:
        return json.loads(data.cpu().numpy().tobytes())
    except (ValueError, RecursionError) as error:
        raise _no_answer(rank, f"sends no JSON ({type(error).__name__})") from error


def _no_answer(rank: int, what: str) -> RunError:
    fix = "Let every rank run the same moefw, and nothing else reach their ports."
    return RunError(f"rank {rank} of the group {what} where ranks exchange JSON.", fix)
