"""Reports of ranks, observations of them from outside, and blame."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moefw.system.stamps import stamp, stamping
from moefw.testing.pool import RankPool
from moefw.training.errors import StoppedError
from moefw.training.faults import requests as requests_module
from moefw.training.faults.blame import Seen, accusation, culprit, in_words
from moefw.training.faults.kernel import GONE, SILENT, STOPPED, is_out_of_memory, oom_kills, process_state
from moefw.training.faults.patience import START_S, Stillness, collective_timeout_s
from moefw.training.faults.peers import Accused, Peers, SilentStoreError, silent_store, speaker
from moefw.training.faults.record import RECORD_BYTES, Ending, Record, read_record, write_ending, write_look, write_who
from moefw.training.faults.requests import StopRequests
from moefw.training.faults.stamps import RankStamps
from moefw.training.faults.where import waits_in


def fresh() -> tuple[memoryview, RankStamps]:
    buffer = memoryview(bytearray(RECORD_BYTES))
    return buffer, RankStamps(buffer, wake=lambda: None)


def test_a_stamp_says_where_the_run_is_and_keeps_its_step() -> None:
    buffer, stamps = fresh()
    assert read_record(buffer).place == "before its first sign of life"
    with stamping(stamps):
        stamp("building the model", slow=True)
        assert (read_record(buffer).place, read_record(buffer).slow) == ("building the model", True)
        stamp("forward", step=3)
        stamp("b\udcffckward " + "x" * 200)
    found = read_record(buffer)
    assert found.place.startswith("step 3, b?ckward xxx")
    assert (found.stamps, found.slow) == (3, False)
    stamp("nowhere")
    assert read_record(buffer) == found


def test_only_the_thread_that_trains_makes_progress() -> None:
    buffer, stamps = fresh()
    with stamping(stamps):
        heartbeat = threading.Thread(target=stamp, args=("alive",))
        heartbeat.start()
        heartbeat.join()
    assert read_record(buffer).stamps == 0


def test_what_a_rank_waits_in_holds_until_its_next_stamp() -> None:
    buffer, stamps = fresh()
    write_who(buffer, 7, "node3", "node3 pid:[4]")
    with stamping(stamps):
        stamp("backward", step=1)
        write_look(buffer, 5, "all_reduce", stamps=1)
        assert read_record(bytes(buffer)).waits_in == "all_reduce"
        stamp("gradients")
    write_ending(buffer, "done")
    assert read_record(buffer) == record(2, "gradients", step=1, beats=5, pid=7, host="node3", ending="done")


def record(
    stamps: int,
    phase: str,
    *,
    step: int = 0,
    slow: bool = False,
    waits_in: str = "",
    beats: int = 0,
    pid: int = 7,
    host: str = "node3",
    ending: Ending = "",
) -> Record:
    return Record(
        stamps=stamps,
        step=step,
        phase=phase,
        slow=slow,
        beats=beats,
        waits_in=waits_in,
        pid=pid,
        host=host,
        machine="node3 pid:[4]",
        ending=ending,
    )


def seen(
    rank: int, still_s: float, state: str = "", *, waits_in: str = "", slow: bool = False, ending: Ending = ""
) -> Seen:
    told = record(9, "forward", step=4, slow=slow, waits_in=waits_in, ending=ending)
    return Seen(rank=rank, record=told, still_s=still_s, state=state)


WAITS = "all_reduce of ranks 0-2"


@pytest.mark.parametrize(
    ("ranks", "blamed"),
    [
        ([seen(0, 2.9), seen(1, 0.0)], None),
        ([seen(0, 3.1), seen(1, 0.0)], 0),
        ([seen(0, 9.0, waits_in=WAITS), seen(1, 2.9)], None),
        ([seen(0, 9.0, waits_in=WAITS), seen(1, 3.1), seen(2, 3.2)], 2),
        ([seen(0, 3.2, waits_in=WAITS), seen(1, 3.1, waits_in=WAITS)], 0),
        ([seen(0, 3.2), seen(1, 2.9, STOPPED)], 1),
        ([seen(0, 3.2), seen(1, 0.1, STOPPED)], 0),
        ([seen(0, 3.2, waits_in=WAITS), seen(1, 3.1, STOPPED, waits_in=WAITS)], 1),
        ([seen(0, 9.0, waits_in=WAITS), seen(1, 200.0, slow=True)], None),
        ([seen(0, 9.0, waits_in=WAITS), seen(1, 9.0, STOPPED, slow=True)], 1),
        ([seen(0, 9.0, waits_in=WAITS), seen(1, 9.0, SILENT, slow=True)], None),
        ([seen(0, 9.0, ending="done"), seen(1, 1.0)], None),
        ([seen(0, 9.0, ending="done")], None),
        ([], None),
    ],
)
def test_who_does_not_wait_and_does_not_get_on_is_blamed(ranks: list[Seen], blamed: int | None) -> None:
    found = culprit(ranks, 3.0)
    assert (found and found.rank) == blamed


def test_the_accusation_groups_those_who_wait_by_what_they_wait_in() -> None:
    ranks = [seen(1, 3.24, STOPPED), *(seen(rank, 3.0, waits_in=WAITS) for rank in (0, 2, 3)), seen(4, 1.0)]
    assert str(accusation(ranks[0], ranks, 3.0)) == (
        "rank 1 (node3, pid 7) has made no progress for 3.2 s (run.timeout_s allows 3): step 4, forward; its process is "
        "stopped; ranks 0, 2 and 3 wait in all_reduce of ranks 0-2. Where work takes longer, use a larger run.timeout_s."
    )


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([4], "rank 4"),
        ([0, 1], "ranks 0 and 1"),
        ([2, 1, 0], "ranks 0-2"),
        ([0, 1, 2, 3, 6, 9], "ranks 0-3, 6 and 9"),
        ([*range(0, 80, 2), 99], "ranks 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30 and 25 more"),
    ],
)
def test_ranks_are_put_in_few_words(ranks: list[int], words: str) -> None:
    assert in_words(ranks) == words


def test_time_in_which_nobody_watched_is_not_held_against_a_rank() -> None:
    now = iter([0.0, 0.0, 0.5, 1.0, 500.0, 500.5])
    still = Stillness(now=lambda: next(now))
    assert [still.of({0: 3})[0] for _ in range(3)] == [0.0, 0.5, 1.0]
    assert still.of({0: 3})[0] == 3.0
    assert still.of({0: 4})[0] == 0.0


def test_collectives_outlast_the_watch() -> None:
    assert collective_timeout_s(3.0) > 2 * START_S
    assert collective_timeout_s(4000.0) > 8000.0


def what_ranks_wait_in() -> list[str]:
    """Return the operations in which rank 0 is seen to wait, in order; rank 1 is late each time."""
    rank, found = dist.get_rank(), list[str]()
    half = dist.new_group([0, 1])
    main = threading.get_ident()
    for wait in (
        lambda: dist.all_reduce(torch.zeros(1)),
        lambda: dist.barrier(group=half),
        waits_for_a_work,
        time_passes,
    ):
        dist.barrier()
        if rank == 1:
            time.sleep(0.6)
            wait()
            continue
        looking = threading.Thread(target=lambda: (time.sleep(0.3), found.append(waits_in(main))))
        looking.start()
        wait()
        looking.join()
    return found


def waits_for_a_work() -> None:
    work = dist.all_to_all_single(torch.zeros(2), torch.zeros(2), async_op=True)
    work.wait()


def time_passes() -> None:
    time.sleep(0.6)


def test_what_a_rank_waits_in_is_read_off_its_frames(pool: RankPool) -> None:
    found, _ = pool.run(what_ranks_wait_in, 2)
    assert found == ["all_reduce of ranks 0 and 1", "barrier of ranks 0 and 1", "alltoall", ""]


def test_a_process_that_is_stopped_or_gone_is_told() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    assert process_state(os.getpid()) == ""
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    assert process_state(process.pid) == STOPPED
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert process_state(process.pid) == GONE
    process.wait()
    assert process_state(process.pid) == GONE


def test_memory_that_ran_out_is_seen_in_an_error_and_in_the_kernels_counters(tmp_path: Path) -> None:
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError())
    with pytest.raises(RuntimeError) as failed:
        torch.empty(1 << 50)
    assert is_out_of_memory(failed.value)
    assert not is_out_of_memory(RuntimeError("shapes differ"))
    assert oom_kills(tmp_path) == 0
    for name, text in {
        "proc/vmstat": "nr_free 3\noom_kill 2\n",
        "proc/self/cgroup": "1:cpu:/\n0::/job\n",
        "sys/fs/cgroup/job/memory.events": "oom 9\noom_kill 5\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert oom_kills(tmp_path) == 7


SERVER = """
import sys, time, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(120)
"""


def test_peers_tell_each_other_through_a_store_until_it_falls_silent() -> None:
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        port = int(server.stdout.readline())
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
        first, last = (Peers(store, rank, 3, timeout_s=1.0) for rank in (0, 2))
        buffer, stamps = fresh()
        stamps.put("forward", 4, slow=False)
        last.tell(bytes(buffer))
        assert {rank: each.place for rank, each in first.look().items() if each.stamps} == {2: "step 4, forward"}
        assert (first.watches, last.watches) == (True, False)
        assert last.accused() is None
        accused = Accused(by=0, machine="node3", pid=9)
        assert first.accuse(accused)
        assert not last.accuse(Accused(by=2, machine="node3", pid=8))
        assert last.accused() == accused
        server.send_signal(signal.SIGSTOP)
        os.waitpid(server.pid, os.WUNTRACED)
        with pytest.raises(SilentStoreError):
            first.accused()
    finally:
        server.kill()
        server.wait()
    with pytest.raises(ConnectionError):
        [last.accused() for _ in range(3)]


def test_who_keeps_a_silent_store_is_named() -> None:
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "head", "MASTER_PORT": "29500"}
    assert (speaker(agent), speaker({})) == (0, 1)
    assert "torchrun, which keeps the ranks' store at head:29500, has not answered for 3 s" in str(
        silent_store(record(1, "x"), 3.0, agent)
    )
    assert "rank 0 (node3, pid 7), which keeps the ranks' store, has not answered" in str(
        silent_store(record(1, "x"), 3.0, {})
    )


def test_a_request_that_the_main_thread_does_not_answer_is_overdue(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(requests_module.time, "monotonic", lambda: now)
    with StopRequests(resumable=lambda: True, torchrun=True) as requests:
        requests.mode = "defer"
        os.kill(os.getpid(), signal.SIGTERM)
        requests.wait(5.0)
        assert requests.asked == signal.SIGTERM
        now = 24.0
        assert requests.overdue() is None
        now = 26.0
        late = requests.overdue()
        assert late is not None
        assert late.exit_code == 1
        requests.mode = "finish"
        assert requests.overdue() is None
        requests.mode = "end"
        late = requests.overdue()
        assert late is not None
        assert late.exit_code == 75


def test_a_request_ends_what_has_nothing_to_save() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with StopRequests(resumable=lambda: False), pytest.raises(StoppedError, match="stopped by SIGUSR1") as stopped:
        signal.raise_signal(signal.SIGUSR1)
    assert stopped.value.exit_code == 128 + signal.SIGUSR1
    assert signal.getsignal(signal.SIGUSR1) == before
