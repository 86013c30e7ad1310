"""Signals that ask a run to stop: SIGTERM, SIGUSR1 and Ctrl-C. The run then saves at the end of its step."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Final, Literal, Self, final

from moefw.training.errors import StoppedError

ASKING: Final = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
INTERRUPTED: Final = 128 + signal.SIGINT
BOUNDARY_S: Final = 25.0
"""Limit for a step to end after torchrun's SIGTERM, which also comes when a peer has died: then no step ends any more.
torchrun kills after 30 s."""
_ANSWER_S: Final = 2.0
"""Limit for the main thread to answer a signal; inside a library it may never do so."""

Mode = Literal["end", "defer", "finish"]


@final
class StopRequests:
    """Signal handlers as a context manager of the main thread; the previous handlers are restored on exit.

    In mode "end" a request ends the process with :class:`StoppedError`; in "defer" it waits in ``asked`` for the end of
    a step; in "finish" all is saved, and the run ends by itself. Ctrl-C after another request always raises
    KeyboardInterrupt. ``resumable`` returns whether there is a checkpoint to continue from. ``launched``: the launcher
    answers Ctrl-C. ``torchrun``: a step that does not end within ``BOUNDARY_S`` of SIGTERM will not end at all.
    """

    def __init__(self, *, resumable: Callable[[], bool], launched: bool = False, torchrun: bool = False) -> None:
        self.asked: signal.Signals | None = None
        self.mode: Mode = "end"
        self._resumable = resumable
        self._launched = launched
        self._torchrun = torchrun
        self._before: dict[int, Any] = {}
        self._pipe = (-1, -1)
        self._arrived: list[tuple[int, float]] = []

    def __enter__(self) -> Self:
        self._pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        for number in ASKING:
            ignored = number == signal.SIGINT and self._launched
            self._before[number] = signal.signal(number, signal.SIG_IGN if ignored else self._handle)
        signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(-1)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        for end in self._pipe:
            os.close(end)

    def stopped(self, number: signal.Signals) -> StoppedError:
        """Error for a signal that comes when there is nothing to save."""
        if self._resumable():
            what = f"stopped by {number.name} before a step was done: the last checkpoint is as it was."
            return StoppedError(what, "Continue with --resume.")
        what = f"stopped by {number.name} before a step was done: there was nothing to save."
        return StoppedError(what, exit_code=128 + number)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self.asked is None:
            self.asked = signal.Signals(number)
            if self.mode == "end":
                raise self.stopped(self.asked)
        elif number == signal.SIGINT:
            raise KeyboardInterrupt

    def wait(self, seconds: float) -> None:
        """Wait for a signal, for :meth:`wake`, or ``seconds``. For a thread other than the main one, which may hang."""
        if select.select([self._pipe[0]], [], [], seconds)[0]:
            self._arrived += [(number, time.monotonic()) for number in os.read(self._pipe[0], 256) if number]

    def wake(self) -> None:
        """End a :meth:`wait` early."""
        os.write(self._pipe[1], b"\0")

    def overdue(self) -> StoppedError | None:
        """Error that would have ended the process if the main thread had answered a signal."""
        now_s = time.monotonic()
        late = [signal.Signals(number) for number, at_s in self._arrived if now_s - at_s > _ANSWER_S]
        if signal.SIGINT in late[1:]:
            return StoppedError("interrupted.", exit_code=INTERRUPTED)
        if late and self.mode == "end":
            return self.stopped(late[0])
        terminated = (at_s for number, at_s in self._arrived if number == signal.SIGTERM)
        if self._torchrun and self.mode == "defer" and now_s - next(terminated, now_s) > BOUNDARY_S:
            what = f"no step ended within {BOUNDARY_S:g} s of torchrun's SIGTERM: nothing was saved."
            return StoppedError(what, "Continue from the last checkpoint with --resume.", exit_code=1)
        return None
