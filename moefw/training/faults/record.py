"""Record of a rank's progress, of a fixed size: in shared memory, or sent to the others as it is."""

from __future__ import annotations

import struct
from typing import Final, Literal

from attrs import frozen

_STAMP: Final = struct.Struct("<Qq?95s")
_LOOK: Final = struct.Struct("<QQ232s")
_WHO: Final = struct.Struct("<Q64s64s")
_ENDING: Final = struct.Struct("<8s")
_LOOK_AT: Final = _STAMP.size
_WHO_AT: Final = _LOOK_AT + _LOOK.size
_ENDING_AT: Final = _WHO_AT + _WHO.size
RECORD_BYTES: Final = _ENDING_AT + _ENDING.size

Ending = Literal["", "done", "told", "lost", "memory"]
"""How a rank left: not yet, at the end of the run, with its own message, after losing others, out of memory."""


@frozen(kw_only=True)
class Record:
    """A rank's last ``phase`` at ``step`` (from 1; 0: before the first), and its number of ``stamps``.

    ``slow``: the phase imports libraries.
    ``beats`` counts the looks of its watch thread, ``waits_in`` names the collective that its main thread was seen in.
    ``machine`` is equal for processes that can send each other signals by ``pid``.
    """

    stamps: int
    step: int
    phase: str
    slow: bool
    beats: int
    waits_in: str
    pid: int
    host: str
    machine: str
    ending: Ending

    @property
    def place(self) -> str:
        """Its place in the run, for a message."""
        if not self.stamps:
            return "before its first sign of life"
        return f"step {self.step}, {self.phase}" if self.step else self.phase


def read_record(buffer: bytes | bytearray | memoryview) -> Record:
    """Record in ``RECORD_BYTES`` bytes. A text that is written during the read may come out mixed."""
    stamps, step, slow, phase = _STAMP.unpack_from(buffer)
    beats, seen_at, waits_in = _LOOK.unpack_from(buffer, _LOOK_AT)
    pid, host, machine = _WHO.unpack_from(buffer, _WHO_AT)
    (ending,) = _ENDING.unpack_from(buffer, _ENDING_AT)
    return Record(
        stamps=stamps,
        step=step,
        phase=_text(phase),
        slow=slow or not stamps,
        beats=beats,
        waits_in=_text(waits_in) if seen_at == stamps else "",
        pid=pid,
        host=_text(host),
        machine=_text(machine),
        ending=_text(ending),  # type: ignore[arg-type]
    )


def write_stamp(buffer: memoryview, stamps: int, step: int, phase: str, *, slow: bool) -> None:
    """Write the main thread's part."""
    _STAMP.pack_into(buffer, 0, stamps, step, slow, phase.encode(errors="replace"))


def write_look(buffer: memoryview, beats: int, waits_in: str, *, stamps: int) -> None:
    """Write the watch thread's part; ``waits_in`` is valid until the next stamp after ``stamps``."""
    _LOOK.pack_into(buffer, _LOOK_AT, beats, stamps, waits_in.encode())


def write_who(buffer: memoryview, pid: int, host: str, machine: str) -> None:
    """Write the process that the record belongs to."""
    _WHO.pack_into(buffer, _WHO_AT, pid, host.encode(), machine.encode())


def write_ending(buffer: memoryview, ending: Ending) -> None:
    """Write how the rank leaves."""
    _ENDING.pack_into(buffer, _ENDING_AT, ending.encode())


def _text(padded: bytes) -> str:
    return padded.rstrip(b"\0").decode(errors="ignore")
