"""The launcher names the rank that blocks a run, whatever happened to it, and leaves no process behind."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from moefw.compose.spec.sections import RunSpec
from moefw.core.errors import PlanError, RunError
from moefw.training import local_ranks
from moefw.training.errors import StoppedError
from moefw.training.faults.requests import StopRequests
from moefw.training.faults.stacks import is_whole
from moefw.training.launcher import check_room, run_local_ranks

HEADER = "Current thread 0x00007f16407bbb80 (most recent call first):\n"
FRAME = '  File "rank.py", line 9 in <module>\n'
RANK = (
    f"""
HEADER, FRAME = {HEADER!r}, {FRAME!r}
"""
    + """
import ctypes, os, signal, sys, time
from pathlib import Path
from moefw.core.errors import RunError
from moefw.training.errors import LostContactError, StoppedError
from moefw.compose.spec.sections import RunSpec
from moefw.training.faults import watch
from moefw.training.faults.rank_files import meeting_folder, stack_file
from moefw.training.faults.rank import watched
from moefw.training.faults.requests import StopRequests
from moefw.system.stamps import stamp
from moefw.training.launcher import die_with_launcher
from moefw.training.world import place_from_environment

place = place_from_environment()
run = RunSpec(dir=sys.argv[1], timeout_s=2.0)

def gets_on(until=60.0):
    end = time.monotonic() + until
    while time.monotonic() < end:
        stamp("forward", step=7)
        time.sleep(0.02)

def waits_for_others():
    stamp("backward", step=7)
    watch.waits_in = lambda thread: "all_reduce of ranks 0 and 1"
    time.sleep(60)

def hangs(how):
    stamp("data", step=7)
    how()

def breaks_off_at_first():
    stacks = [HEADER, HEADER + FRAME]
    with stack_file(meeting_folder(), place.rank).open("a") as file:
        signal.signal(signal.SIGUSR2, lambda *_: (file.write(stacks.pop(0)), file.flush()))
        hangs(lambda: [time.sleep(1) for _ in range(60)])

def is_done():
    stamp("plots", step=7)

def fails():
    raise RunError("an expert caught fire.")

def loses_contact():
    stamp("backward", step=7)
    raise LostContactError("somebody is gone.")

def ready(step):
    stamp("forward", step=step)
    Path(run.dir, f"ready-{place.rank}").touch()

def begins():
    ready(0)
    while True:
        stamp("building")
        time.sleep(0.02)

def takes_no_request():
    requests.mode = "defer"
    ready(7)
    gets_on()

def stops_when_asked():
    requests.mode = "defer"
    ready(7)
    while requests.asked is None:
        stamp("forward")
        time.sleep(0.02)
    Path(run.dir, f"asked-{place.rank}").touch()
    raise StoppedError("stopped by a signal.")

def shows_folder():
    folder = meeting_folder()
    Path(run.dir, "folder").write_text(f"{folder} {oct(folder.stat().st_mode)}")

die_with_launcher()
code = 0
with StopRequests(resumable=lambda: False, launched=True) as requests:
    try:
        with watched(run, place, requests, memory_note=str):
            eval(sys.argv[2 + place.rank])
    except StoppedError as stopped:
        code = stopped.exit_code
    except RunError as error:
        print(f"error: {error.problems[0].what}", file=sys.stderr, flush=True)
        code = error.exit_code
    except SystemExit as left:
        code = left.code
os._exit(code)
"""
)


@pytest.fixture
def run(tmp_path: Path) -> RunSpec:
    return RunSpec(dir=str(tmp_path), timeout_s=2.0)


def launch(run: RunSpec, *ranks: str, resumable: bool = False) -> int:
    """Run ranks with the given code; return the exit code, and check that no process is left."""
    before = children(os.getpid())
    with StopRequests(resumable=lambda: resumable) as requests:
        command = [sys.executable, "-c", RANK, run.dir, *ranks]
        try:
            return run_local_ranks(command, len(ranks), run, requests, memory_note=lambda: "Planned: a lot.")
        finally:
            assert children(os.getpid()) <= before


def children(parent: int) -> set[str]:
    return set(Path(f"/proc/{parent}/task/{parent}/children").read_text().split())


def complaint(run: RunSpec, *ranks: str) -> str:
    with pytest.raises(RunError) as failed:
        launch(run, *ranks)
    return str(failed.value)


HANGS = {
    "sleeps": "time.sleep(60)",
    "blocks": "os.read(os.pipe()[0], 1)",
    "keeps the interpreter's lock": "ctypes.PyDLL(None).sleep(60)",
}


@pytest.mark.fault("a rank {id}", "named with step, phase and what the others wait in; stacks are kept")
@pytest.mark.parametrize("how", HANGS.values(), ids=HANGS)
def test_a_rank_that_does_not_get_on_is_named_with_what_the_others_wait_in(run: RunSpec, how: str) -> None:
    said = complaint(run, "waits_for_others()", f"hangs(lambda: {how})")
    assert said.startswith("rank 1 (")
    still_s = float(re.findall(r"has made no progress for (\S+) s", said)[0])
    assert 2.0 <= still_s < 3.0
    assert "step 7, data; rank 0 waits in all_reduce of ranks 0 and 1. " in said
    assert f"The stacks of the ranks are in {run.dir}/stacks." in said
    assert "in hangs" in Path(run.dir, "stacks", "rank-1.txt").read_text()
    assert "in waits_for_others" in Path(run.dir, "stacks", "rank-0.txt").read_text()


@pytest.mark.fault("a stopped rank", "named, and its stack is kept")
def test_a_stopped_rank_is_named_and_leaves_its_stack(run: RunSpec) -> None:
    """Once continued, it writes its stack: from any thread, so its main thread may be some lines further by then."""
    said = complaint(run, "waits_for_others()", "hangs(lambda: os.kill(os.getpid(), signal.SIGSTOP) or time.sleep(60))")
    assert said.startswith("rank 1 (")
    assert "step 7, data; its process is stopped; rank 0 waits" in said
    assert "in hangs" in Path(run.dir, "stacks", "rank-1.txt").read_text()


OTHER_THREAD = 'Thread 0x00007f163fb3d6c0 (most recent call first):\n  File "threading.py", line 1002 in _bootstrap\n\n'


@pytest.mark.parametrize("outermost", ["<module>", "_run_module_as_main"])
def test_stacks_are_whole_when_they_end_with_the_outermost_frame_of_the_main_thread(outermost: str) -> None:
    whole = OTHER_THREAD + HEADER + f'  File "rank.py", line 4 in hangs\n  File "rank.py", line 9 in {outermost}\n'
    assert is_whole(whole)
    assert not any(is_whole(whole[:length]) for length in range(len(whole)))


def test_a_rank_whose_stacks_break_off_is_asked_again(run: RunSpec) -> None:
    complaint(run, "waits_for_others()", "breaks_off_at_first()")
    assert Path(run.dir, "stacks", "rank-1.txt").read_text() == HEADER + HEADER + FRAME


def test_a_rank_that_waits_is_excused_while_another_gets_on(run: RunSpec) -> None:
    said = complaint(run, "waits_for_others()", "gets_on(until=5.0) or os._exit(5)")
    assert "left with exit code 5" in said


@pytest.mark.fault("all ranks wait for each other", "told with the collective")
def test_ranks_that_all_wait_for_each_other_are_told(run: RunSpec) -> None:
    said = complaint(run, "waits_for_others()", "waits_for_others()")
    assert "backward, waiting in all_reduce of ranks 0 and 1, as every rank waits" in said


@pytest.mark.fault("a rank leaves with exit code {id}", "named with its step and phase")
@pytest.mark.parametrize("code", [0, 3])
def test_a_rank_that_leaves_before_the_others_is_named(run: RunSpec, code: int) -> None:
    said = complaint(run, "gets_on()", f"hangs(lambda: os._exit({code}))")
    assert said.startswith("rank 1 (")
    assert f"left with exit code {code} at step 7, data, before the run was done." in said


@pytest.mark.fault("a rank calls sys.exit({id})", "named with its step and phase")
@pytest.mark.parametrize("code", [0, 3])
def test_a_rank_that_calls_sys_exit_is_named(run: RunSpec, capfd: pytest.CaptureFixture[str], code: int) -> None:
    assert launch(run, "gets_on()", f"hangs(lambda: sys.exit({code}))") == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: rank 1 (")
    assert f"left with exit code {code} at step 7, data, before the run was done." in line


@pytest.mark.fault("a rank is killed", "named with its step and phase")
def test_a_killed_rank_is_named_with_where_it_was(run: RunSpec) -> None:
    said = complaint(run, "gets_on()", "hangs(lambda: os.kill(os.getpid(), signal.SIGKILL))")
    assert said.startswith("rank 1 was ended by SIGKILL at step 7, data (")
    assert "Memory" not in said
    assert said.endswith("The run has no checkpoint yet: train again without --resume.")


@pytest.mark.fault("a rank is killed when there are checkpoints", "the step that --resume goes on from is told")
def test_the_step_to_go_on_from_is_told(run: RunSpec) -> None:
    for name in ("step-2", "step-4", "step-6.tmp"):
        Path(run.dir, "checkpoints", name).mkdir(parents=True)
    said = complaint(run, "gets_on()", "hangs(lambda: os.kill(os.getpid(), signal.SIGKILL))")
    assert said.endswith("Continue from the checkpoint of step 4 with --resume.")


@pytest.mark.fault("the kernel kills a rank for memory", "named, with what the plan says of it")
def test_a_rank_killed_for_memory_is_told_the_plan(run: RunSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    kills = iter([4])
    monkeypatch.setattr(local_ranks, "oom_kills", lambda: next(kills, 5))
    said = complaint(run, "gets_on()", "hangs(lambda: os.kill(os.getpid(), signal.SIGKILL))")
    assert "Memory had run out: the kernel killed 1 process for it. Planned: a lot." in said


@pytest.mark.fault("a rank gets no memory ({id})", "named, with what the plan says of it")
@pytest.mark.parametrize("how", ["bytearray(1 << 62)", "bytearray(1 << 60)"])
def test_a_rank_without_memory_is_told_the_plan(run: RunSpec, capfd: pytest.CaptureFixture[str], how: str) -> None:
    said = complaint(run, "gets_on()", f"hangs(lambda: {how})")
    assert "ran out of memory at step 7, data. Planned: a lot." in said
    assert not capfd.readouterr().err


def test_who_only_lost_contact_adds_no_message(run: RunSpec, capfd: pytest.CaptureFixture[str]) -> None:
    assert launch(run, "loses_contact()", "hangs(fails)") == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert line == "error: an expert caught fire."
    said = complaint(run, "loses_contact()", "loses_contact()")
    assert said.startswith("ranks 0 and 1 lost contact with the others at step 7, backward")


def test_ranks_that_end_well_one_after_the_other_end_the_run_well(run: RunSpec) -> None:
    assert launch(run, "is_done()", "gets_on(until=1.0)") == 0


@pytest.mark.fault("{id} to the launcher", "reaches every rank once; exit code 75")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_request_reaches_every_rank_once(run: RunSpec, number: signal.Signals) -> None:
    with when_all_are_ready(run, number):
        assert launch(run, "stops_when_asked()", "stops_when_asked()") == 75
    assert {path.name for path in Path(run.dir).glob("asked-*")} == {"asked-0", "asked-1"}


def test_a_second_interrupt_ends_all_ranks_at_once(run: RunSpec) -> None:
    with when_all_are_ready(run, signal.SIGINT, signal.SIGINT), pytest.raises(KeyboardInterrupt):
        launch(run, "takes_no_request()", "takes_no_request()")


@pytest.mark.parametrize(("resumable", "code"), [(False, 143), (True, 75)])
def test_a_request_before_the_first_step_ends_the_run(run: RunSpec, resumable: bool, code: int) -> None:
    with when_all_are_ready(run, signal.SIGTERM), pytest.raises(StoppedError) as stopped:
        launch(run, "takes_no_request()", "begins()", resumable=resumable)
    assert stopped.value.exit_code == code


@contextmanager
def when_all_are_ready(run: RunSpec, *numbers: signal.Signals) -> Iterator[None]:
    """Send signals to this process, as a user would, when both ranks have reported that they are ready."""

    def send() -> None:
        deadline = time.monotonic() + 60
        while len(list(Path(run.dir).glob("ready-*"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        for number in numbers:
            time.sleep(0.3)
            os.kill(os.getpid(), number)

    sender = threading.Thread(target=send)
    sender.start()
    yield
    sender.join()


def test_ranks_share_a_private_folder_which_goes_with_them(run: RunSpec) -> None:
    assert launch(run, "shows_folder()") == 0
    folder, mode = Path(run.dir, "folder").read_text().split()
    assert mode == "0o40700"
    assert not Path(folder).exists()


@pytest.mark.fault("4,096 ranks on two cores", "refused before any is started")
def test_more_ranks_than_a_machine_holds_are_refused() -> None:
    check_room(64, cores=2)
    check_room(512, cores=64)
    with pytest.raises(PlanError, match=r"4,096 ranks; with 2 cores, this machine starts 64 at most. Start them on"):
        check_room(4096, cores=2)
