"""Pool of gloo processes that start once, so that a test on several ranks takes milliseconds."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ensure_running
from typing import Any, Literal

import torch
import torch.distributed as dist

from moefw.core.errors import ContractError
from moefw.testing.deaths import death_text, write_stacks_to
from moefw.testing.error_text import error_text
from moefw.testing.frozen_stages import freeze_stages
from moefw.testing.lateness import LOOK_S, Lateness, main_thread_s

COLLECTIVE_TIMEOUT_S = 120.0
"""Seconds after which gloo gives up: later than a job's usual limit, as the pool tells ranks that hang from slow ones,
and soon enough that ranks whose pool was killed do not stay."""
CONNECTS = 3
"""Number of attempts to connect: on a busy machine, gloo's ranks sometimes fail to ("closed by peer")."""
GRACE_S = 3.0
"""Seconds that the other ranks have left after the first failure: they may wait for the failed one."""
PRELOADED = ["moefw.training.trainer"]
"""Modules that the process imports of which all ranks are copies."""

Status = Literal["done", "failed", "unconnected"]
"""How a rank's job ended. ``unconnected``: before its process group was open."""


def copies_context() -> ForkServerContext:
    """Return the context whose processes are copies of one that has imported ``PRELOADED``, and start that one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, "moefw.testing.warm"])
    with _safe_path():
        ensure_running()
    return context


@contextmanager
def _safe_path() -> Iterator[None]:
    """Start Python inside without the working folder on its import path: ``multiprocessing`` lets nobody add ``-P``.

    A copy gets the import path of the process that asks for it.
    """
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before


class _UnconnectedError(Exception):
    """The ranks of a world did not connect, so the job can be repeated."""


@dataclass(kw_only=True)
class _Worker:
    """A rank's process, with the pipe for its jobs and answers, and the one it writes to when a signal kills it."""

    process: Any
    pipe: Connection
    stacks: Connection

    def death_text(self) -> str:
        """What became of the process, which is about to end."""
        self.process.join()
        return death_text(self.process.exitcode, self.stacks.fileno())

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()
        self.stacks.close()


class RankPool:
    """Runs functions on 1 to ``size`` ranks. Each job gets a new process group; a failed job restarts the pool.

    Processes start with the first job that needs them.
    """

    def __init__(self, size: int = 4) -> None:
        self.size = size
        self._workers: list[_Worker] = []
        self._store: Any = None
        self._jobs = 0

    def run(self, function: Callable[..., Any], world: int, *args: Any, timeout_s: float = 120.0) -> list[Any]:
        """``function(*args)`` of every rank of a gloo world, in rank order.

        ``function`` must be importable by name. Raises ContractError, with what each failed rank tells of it, if a rank
        fails, or has not answered after ``timeout_s`` and hangs. One that computes is waited for: see ``Lateness``.
        """
        if not 1 <= world <= self.size:
            raise ValueError(f"a pool of {self.size} ranks cannot run a world of {world}")
        last_error = ""
        for _ in range(CONNECTS):
            try:
                return self._run(function, world, args, timeout_s)
            except _UnconnectedError as error:
                last_error = str(error)
        raise ContractError(f"{world} ranks do not connect, tried {CONNECTS} times.\n{last_error}")

    def _run(self, function: Callable[..., Any], world: int, args: tuple[Any, ...], timeout_s: float) -> list[Any]:
        """Send a job to the first ranks, and return their answers. Raises _UnconnectedError if it can be repeated."""
        self._start(world)
        self._jobs += 1
        for rank, worker in enumerate(self._workers[:world]):
            # The path first, in a message of its own: unpickling the function imports its module.
            worker.pipe.send_bytes(pickle.dumps(sys.path))
            worker.pipe.send_bytes(pickle.dumps((self._jobs, rank, world, function, args)))
        return self._collect(world, timeout_s)

    def _collect(self, world: int, timeout_s: float) -> list[Any]:
        """Answers in rank order. Raises an error with all failures, after which no process is left."""
        answers: list[Any] = [None] * world
        failures: list[str] = []
        unconnected = False
        waiting = set(range(world))
        deadline = time.monotonic() + timeout_s
        lateness = Lateness(timeout_s, lambda rank: main_thread_s(self._workers[rank].process.pid))
        while waiting:
            if time.monotonic() >= deadline:
                if failures or not lateness.any_computes(waiting):
                    break
                deadline = time.monotonic() + LOOK_S
            pipes: dict[Any, int] = {self._workers[rank].pipe: rank for rank in waiting}
            answered = wait(list(pipes), timeout=max(0.0, deadline - time.monotonic()))
            for rank in sorted(pipes[pipe] for pipe in answered):
                worker = self._workers[rank]
                waiting.discard(rank)
                status: Status
                try:
                    status, answer = pickle.loads(worker.pipe.recv_bytes())
                except EOFError:
                    status = "failed"
                    answer = worker.death_text()
                if status == "unconnected":
                    unconnected = True
                if status == "done":
                    answers[rank] = answer
                else:
                    failures.append(f"rank {rank}: {answer}")
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        failures += [f"rank {rank}: no answer in time" for rank in sorted(waiting)]
        if failures:
            self.close()
            raise (_UnconnectedError if unconnected else ContractError)("\n".join(failures))
        return answers

    def _start(self, world: int) -> None:
        """Start processes until there are as many as ranks of a world: each costs two seconds of imports."""
        if self._store is None:
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        context = copies_context()
        for _ in range(len(self._workers), world):
            pipe, pipe_of_rank = context.Pipe()
            stacks, stacks_of_rank = context.Pipe(duplex=False)
            arguments = (pipe_of_rank, stacks_of_rank, self._store.port)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            # The process alone holds its ends, so that its death is read as the end of what comes through.
            pipe_of_rank.close()
            stacks_of_rank.close()
            self._workers.append(_Worker(process=process, pipe=pipe, stacks=stacks))

    def close(self) -> None:
        """End the processes; the next job starts new ones."""
        for worker in self._workers:
            worker.end()
        self._workers = []
        self._store = None


def _serve(pipe: Connection, stacks: Connection, port: int) -> None:
    """Run the jobs that come through a pipe; answer each with its status, and its result or what is told of its end."""
    write_stacks_to(stacks.fileno())
    torch.set_num_threads(1)
    freeze_stages()
    _freeze()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
    while True:
        try:
            sys.path[:] = pickle.loads(pipe.recv_bytes())
            job, rank, world, function, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        status: Status = "unconnected"
        answer: tuple[Status, Any]
        store_of_job = dist.PrefixStore(f"job{job}", store)  # type: ignore[attr-defined]
        try:
            dist.init_process_group(
                "gloo",
                store=store_of_job,
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
            )
            store_of_job.set(f"connected{rank}", "")
            status = "failed"
            answer = ("done", function(*args))
        except BaseException as error:
            answer = (status, error_text(error))
        pipe.send_bytes(pickle.dumps(answer))
        if status == "unconnected":
            return
        # Those that still connect would find a connection closed, and fail.
        store_of_job.wait([f"connected{each}" for each in range(world)])
        dist.destroy_process_group()
        del function, args, answer
        _freeze()


def _freeze() -> None:
    """Free what cycles hold, such as groups, whose threads wake 100 times a second; exclude the rest, which stays."""
    gc.collect()
    gc.freeze()
