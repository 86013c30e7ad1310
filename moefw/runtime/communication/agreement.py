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
"""Size limit of one answer, in whole words. A checkpoint's list of tensors has a few hundred bytes for each tensor."""

_WORD: Final = torch.int32
"""What travels. Unlike bytes, integers have values also where a rank is measured without memory."""


def everywhere(answer: Any, group: ProcessGroup | None) -> list[Any]:
    """Answers of all ranks of the group, in rank order. ``group`` None: this rank alone. Collective.

    ``answer`` must be JSON-serializable. It travels on the CPU over gloo, and on the GPU over NCCL. Raises RunError if
    a rank sends something other than JSON.
    """
    if group is None:
        return [answer]
    device = torch.device("cuda" if "nccl" in dist.get_backend(group) else "cpu")
    encoded = bytearray(json.dumps(answer).encode())
    encoded.extend(b" " * (-len(encoded) % _WORD.itemsize))  # whole words: JSON may end in spaces
    own = torch.frombuffer(encoded, dtype=_WORD).to(device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(group.size())]
    dist.all_gather(sizes, torch.tensor([own.nbytes], device=device), group=group)
    lengths = [int(size) for size in sizes]
    wrong = [rank for rank, length in enumerate(lengths) if not 0 < length <= MAX_BYTES or length % _WORD.itemsize]
    if wrong:
        raise _no_answer(wrong[0], f"announces {lengths[wrong[0]]} bytes")
    padded = torch.zeros(max(lengths) // _WORD.itemsize, dtype=_WORD, device=device)
    padded[: own.numel()] = own
    sent = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(sent, padded, group=group)
    return [
        _read(rank, words[: length // _WORD.itemsize])
        for rank, (words, length) in enumerate(zip(sent, lengths, strict=True))
    ]


def anywhere(answer: bool, group: ProcessGroup | None) -> bool:
    """Whether ``answer`` is True on any rank of a host group. ``group`` None: this rank alone. Collective."""
    if group is None:
        return answer
    largest = torch.tensor([int(answer)])
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return bool(largest)


def raise_together(error: MoefwError | None, group: ProcessGroup | None) -> None:
    """Raise the error of the first rank that has one, on every rank; do nothing if none has one. Collective."""
    own = None
    if error is not None:
        own = [type(error).__name__, [[problem.what, problem.fix, problem.where] for problem in error.problems]]
    first = next((answer for answer in everywhere(own, group) if answer is not None), None)
    if first is None:
        return
    if error is None or first != own:  # else this rank's own is raised, with its traceback
        name, problems = first
        kinds = {kind.__name__: kind for kind in (*MoefwError.__subclasses__(), DamagedDataError)}
        error = kinds.get(name, RunError)([Problem(*map(str, problem)) for problem in problems])
    error.on_every_rank = True
    raise error


def _read(rank: int, words: torch.Tensor) -> Any:
    """Answer in the words that a rank sent."""
    try:
        return json.loads(words.cpu().numpy().tobytes())
    except (ValueError, RecursionError) as error:
        raise _no_answer(rank, f"sends no JSON ({type(error).__name__})") from error


def _no_answer(rank: int, what: str) -> RunError:
    fix = "Let every rank run the same moefw, and nothing else reach their ports."
    return RunError(f"rank {rank} of the group {what} where ranks exchange JSON.", fix)
