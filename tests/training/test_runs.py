"""Whole runs through the command line: training, SIGKILL and --resume, what the user sees, and bad input."""

from __future__ import annotations

import io
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr
from pathlib import Path

import pytest
import torch

import copies
from command_here import complaint, moefw_says
from dispatchers import DISPATCHERS
from moefw.cli import main
from moefw.commands import specs
from moefw.compose.build import Shared, build_model, open_layout
from moefw.runtime.naming import initialise
from moefw.testing.pool import RankPool
from moefw.training.folder import checkpoint_dirs
from moefw.training.session import Session
from moefw.training.trainer import Trainer
from pairwise import each_value
from run_cases import TORCHRUN, ranks_of

SPEC = """\
model: {dim: 32, num_layers: 2, num_experts: 8, top_k: 2, expert_dim: 32}
attention: {num_heads: 2, num_kv_heads: 1, head_dim: 16}
routing: {use: topk, score: sigmoid, balance: [{kind: expert_bias}]}
parallel: %s
data: {use: text, path: %s}
train: {steps: 8, tokens_per_step: 256, micro_batch: 2, seq_len: 64, lr: 3.0e-3, checkpoint_every: 3, eval_every: 4, eval_tokens: 512}
run: {dir: %s, seed: 1, device: cpu}
"""


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory):
    os.environ["MOEFW_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield
    del os.environ["MOEFW_CACHE"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    words = "the quick brown fox jumps over a lazy dog while expert routers learn to share tokens fairly".split()
    chance = random.Random(0)
    for number in range(12):
        (folder / f"{number}.txt").write_text(" ".join(chance.choice(words) for _ in range(1500)))
    return folder


SPLIT = "{dense: {dp: 1, cp: 2, tp: 2, shard: all}, experts: {ep: 2, shard: all}}"
"""Four ranks that split everything: sequences, attention, experts, and copies."""


def spec(folder: Path, text: Path, layout: int | str, name: str = "run") -> Path:
    """Write a spec. A number as layout is the number of expert-parallel ranks."""
    path = folder / f"{name}.yaml"
    parallel = layout if isinstance(layout, str) else f"{{experts: {{ep: {layout}}}}}"
    path.write_text(SPEC % (parallel, text, folder / name))
    return path


def train(*arguments: object) -> str:
    """Return the output of a run of several ranks."""
    done = copies.run("moefw", "train", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(run: Path) -> dict[int, float]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["step"] for record in records] == sorted({record["step"] for record in records})
    return {record["step"]: record["loss"] for record in records}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, text: Path) -> tuple[Path, str]:
    """A finished run on two ranks: its folder and what it printed."""
    folder = tmp_path_factory.mktemp("trained")
    return folder / "run", train(spec(folder, text, 2))


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    """The folder of a finished run on four ranks that split everything."""
    folder = tmp_path_factory.mktemp("split")
    train(spec(folder, text, SPLIT))
    return folder / "run"


def test_a_run_leaves_metrics_a_report_a_sample_and_checkpoints(trained: tuple[Path, str]) -> None:
    run, printed = trained
    assert list(losses(run)) == list(range(1, 9))
    assert losses(run)[8] < losses(run)[1]
    assert {path.name for path in run.iterdir()} >= {
        "spec.yaml",
        "metrics.jsonl",
        "tensorboard",
        "report.html",
        "sample.txt",
    }
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"step-6", "step-8"}
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all(math.isfinite(record["grad_norm"]) and record["tokens_per_s"] > 0 for record in records)
    assert records[3]["eval_bits_per_byte"] > records[7]["eval_bits_per_byte"] > 0
    for word in ("forward", "backward", "zlib", "bits", "balance"):
        assert word in printed


def test_the_last_lines_are_commands_that_go_on_with_the_run(trained: tuple[Path, str]) -> None:
    run, printed = trained
    generate, evaluate, report = (line.strip() for line in printed.rstrip().splitlines()[-3:])
    assert generate == f"moefw generate {run} --prompt 'def '"
    assert evaluate == f"moefw eval {run}"
    assert report == f"the report is in {run / 'report.html'}"


def test_eval_of_the_run_gives_the_loss_that_training_saw(trained: tuple[Path, str]) -> None:
    run, _ = trained
    found = json.loads(moefw_says("eval", run, "--json"))
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert found["step"] == 8
    assert found["eval_loss"] == pytest.approx(last["eval_loss"], rel=1e-5)


def test_generate_continues_the_prompt_and_repeats_itself_with_a_seed(trained: tuple[Path, str]) -> None:
    run, _ = trained
    first, second = (
        moefw_says("generate", run, "--prompt", "the quick", "--tokens", 20, "--seed", 5) for _ in range(2)
    )
    assert first == second
    assert first.startswith("the quick")


def test_generate_says_how_much_of_a_prompt_the_model_sees(trained: tuple[Path, str]) -> None:
    run, _ = trained
    with redirect_stderr(io.StringIO()) as said, pytest.raises(SystemExit):
        main(["generate", str(run), "--prompt", "the quick brown fox", "--tokens", "1", "--window", "4"])
    cut = re.search(
        r"note: the model sees the last 4 of the (\d+) tokens it is given; --window sets how many", said.getvalue()
    )
    assert cut is not None
    assert int(cut[1]) > 4


@pytest.mark.parametrize("choice", ["3", "last-good"])
def test_a_choice_behind_resume_is_told_to_follow_a_sign(trained: tuple[Path, str], choice: str) -> None:
    run, _ = trained
    for words in ((run / "spec.yaml", "--resume", choice), ("--resume", choice, run / "spec.yaml")):
        said = moefw_says("train", *words, code=2)
        assert f"--resume takes what it is to continue from behind a =: --resume={choice}" in said


def test_generate_says_once_that_it_reads_all_again(trained: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moefw.training.generate.keeps_past", lambda _: False)
    run, _ = trained
    with redirect_stderr(io.StringIO()) as said, pytest.raises(SystemExit):
        main(["generate", str(run), "--prompt", "the", "--tokens", "3"])
    assert said.getvalue().count("no past is kept") == 1


@pytest.mark.fault("launcher and ranks are killed, layout {id}", "losses of all steps bit-equal to an unbroken run")
@pytest.mark.parametrize("layout", [2, pytest.param(SPLIT, marks=pytest.mark.deep)])
def test_a_run_killed_in_the_middle_goes_on_bit_for_bit(
    tmp_path: Path, text: Path, request: pytest.FixtureRequest, layout: int | str
) -> None:
    whole = request.getfixturevalue("split") if layout == SPLIT else request.getfixturevalue("trained")[0]
    broken = spec(tmp_path, text, layout, "broken")
    process = copies.Copy(["moefw", "train", broken])
    # A checkpoint is committed some steps after its own.
    wait_until(lambda: checkpoint_dirs(tmp_path / "broken"), process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(10)
    assert "continuing after step" in train(broken, "--resume")
    assert losses(tmp_path / "broken") == losses(whole)


def wait_until(true, process: subprocess.Popen[bytes] | copies.Copy, timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, "the run did not get that far"
        assert process.poll() is None, "the run ended before it was killed"
        time.sleep(0.002)


@pytest.mark.fault("one of two ranks is killed", "one message; no rank is left")
def test_one_killed_rank_ends_the_run_with_one_message(tmp_path: Path, text: Path) -> None:
    path = spec(tmp_path, text, 2)
    process = copies.Copy(["moefw", "train", path, "train.steps=100000"])
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 2, process)
    _, victim = ranks_of(process.pid)
    os.kill(victim, signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "rank 1 was ended by SIGKILL" in errors
    assert "Traceback" not in errors
    assert not children(process.pid)


def children(parent: int) -> list[int]:
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            if f"PPid:\t{parent}\n" in status.read_text():
                found.append(int(status.parent.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize(
    ("before", "layout"),
    [
        ("trained", "{dense: {cp: 2}, experts: {etp: 2}}"),
        pytest.param("split", "{}", marks=pytest.mark.deep),
    ],
)
def test_resume_may_change_the_layout(
    tmp_path: Path, text: Path, request: pytest.FixtureRequest, before: str, layout: str
) -> None:
    found, run = request.getfixturevalue(before), tmp_path / "run"
    earlier = found if before == "split" else found[0]
    shutil.copytree(earlier, run)
    shutil.rmtree(run / "checkpoints" / "step-8")
    train(spec(tmp_path, text, layout), "--resume", f"run.dir={run}")
    there, here = losses(earlier), losses(run)
    assert here.keys() == there.keys()
    assert all(here[step] == pytest.approx(there[step], rel=1e-5) for step in there)
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert json.loads(moefw_says("eval", run, "--json"))["eval_loss"] == pytest.approx(last["eval_loss"], rel=1e-5)


QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.yaml"


def learn(overrides: list[str], cache: Path) -> list[float]:
    """Return the losses of 5 steps of the quickstart on this rank's world."""
    assembly = specs.read(str(QUICKSTART), overrides, 2)
    layout, shared = open_layout(assembly, "cpu"), Shared()
    data = assembly.parts.data.prepare(cache)
    model = build_model(assembly, layout, torch.device("cpu"), shared)
    initialise(model, seed=assembly.spec.run.seed, std=model.init_std)
    session = Session(
        assembly=assembly, device=torch.device("cpu"), layout=layout, data=data, model=model, shared=shared
    )
    trainer = Trainer(session, resume=None)
    found = [trainer._step(step)[0]["loss"] for step in range(5)]
    shared.close()
    return found


def test_the_quickstart_learns_the_same_under_every_dispatcher(pool: RankPool, text: Path, tmp_path: Path) -> None:
    found = {}
    for name, options in DISPATCHERS.items():
        chosen = [f"dispatch={json.dumps(options)}", "precision={use: fp32}", "train.eval_every=0", "run.device=cpu"]
        chosen += [f"data.path={text}", "data.tokenizer=bytes", "model.vocab_size=256", "model.num_layers=1"]
        chosen += ["parallel.ranks_per_node=1", "train.tokens_per_step=512", "train.micro_batch=4", "train.seq_len=64"]
        found[name] = pool.run(learn, 2, chosen, tmp_path)[0]
    wanted = found.pop("alltoall")
    assert wanted[-1] < wanted[0]
    for name, got in found.items():
        assert got == pytest.approx(wanted, rel=2e-6), name


def test_training_again_moves_the_earlier_run_aside(tmp_path: Path, text: Path) -> None:
    path = spec(tmp_path, text, 1)
    for _ in range(2):
        said = moefw_says("train", path, "train.steps=1", "train.checkpoint_every=0")
    assert "held an earlier run" in said
    assert (tmp_path / "run.1" / "metrics.jsonl").is_file()


def test_the_ranks_of_torchrun_are_joined(tmp_path: Path, text: Path) -> None:
    path = spec(tmp_path, text, 1)
    done = copies.run(*TORCHRUN, "train", path, "train.steps=2")
    assert done.returncode == 0, done.stderr
    assert "2 ranks (dp=2 edp=2)" in done.stdout
    assert list(losses(tmp_path / "run")) == [1, 2]
    failed = copies.run(*TORCHRUN, "train", path, "train.seq_len=0")
    assert "error: command line, 'train.seq_len=0' train.seq_len" in failed.stderr


def test_bad_input_gets_one_clear_message_and_writes_nothing(tmp_path: Path, text: Path) -> None:
    path = spec(tmp_path, text, 1)
    (tmp_path / "empty").mkdir()
    assert "nowhere" in complaint("train", path, f"data.path={tmp_path / 'nowhere'}")
    assert "empty" in complaint("train", path, f"data.path={tmp_path / 'empty'}")
    assert "no checkpoint" in complaint("train", path, "--resume")
    assert "cannot be read" in complaint("train", tmp_path / "no.yaml")
    assert "not the folder of a run" in complaint("eval", tmp_path)
    assert "3 ranks do not fit" in complaint("check", path, "parallel.experts.ep=2", "--world", 3)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_checkpoint_of_another_model_is_refused_and_kept(tmp_path: Path, trained: tuple[Path, str]) -> None:
    shutil.copytree(trained[0], tmp_path / "run")
    before = sorted(path.name for path in (tmp_path / "run").rglob("*"))
    deeper = complaint("eval", tmp_path / "run", "model.num_layers=3")
    wider = complaint("eval", tmp_path / "run", "model.expert_dim=64")
    assert "another model" in deeper
    assert "layers.2" in deeper
    assert "(32, 32) there and (64, 32) here" in wider
    assert sorted(path.name for path in (tmp_path / "run").rglob("*")) == before


def test_a_checkpoint_goes_with_its_tokenizer_which_the_run_keeps(tmp_path: Path, text: Path) -> None:
    shutil.copytree(text, tmp_path / "text")
    settings = ["data.tokenizer=bpe-300", "model.vocab_size=300", "train.steps=2"]
    moefw_says("train", spec(tmp_path, tmp_path / "text", 1), *settings)
    run, (changed, *_) = tmp_path / "run", sorted((tmp_path / "text").iterdir())
    changed.write_text("entirely other words " * 500)
    refused = complaint("eval", run)
    assert "step-2 was trained with another tokenizer" in refused
    assert "step-2 was trained with another tokenizer" in complaint(
        "train", run / "spec.yaml", "--resume", "train.steps=3"
    )
    assert refused.endswith(f"Use data.tokenizer={run}/tokenizer.json")
    own = f"data.tokenizer={run}/tokenizer.json"
    assert "lies in run.dir, which gives way to the new run" in complaint("train", run / "spec.yaml", own)
    moefw_says("train", run / "spec.yaml", "--resume", "train.steps=3", own)
    moved = shutil.move(run, tmp_path / "moved")
    assert json.loads(moefw_says("eval", moved, "--json"))["step"] == 3


def test_ids_that_the_model_does_not_know_are_refused_before_the_run(tmp_path: Path, text: Path) -> None:
    path = spec(tmp_path, text, 1)
    assert "text needs 300 token ids: bpe-300 has them; decoder offers 256. Use model.vocab_size: 300." in complaint(
        "check", path, "data.tokenizer=bpe-300"
    )
    assert "no room for all 256 bytes" in complaint("check", path, "data.tokenizer=bpe-100")
    assert "Use for example bpe-2048." in complaint("check", path, "data.tokenizer=BPE_300")


def test_several_ranks_do_not_read_a_spec_from_a_pipe(tmp_path: Path, text: Path) -> None:
    command = [sys.executable, "-m", "moefw", "train", "/dev/stdin"]
    given = spec(tmp_path, text, 2).read_text()
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "no file, and each of several ranks reads it" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("temperature", ["nan", "1e-320", "-1", "inf"])
def test_a_temperature_that_gives_no_probabilities_is_refused(trained: tuple[Path, str], temperature: str) -> None:
    refused = moefw_says("generate", trained[0], "--prompt", "x", "--temperature", temperature, code=2)
    assert "neither 0 nor between 0.001 and 1000" in refused


@pytest.mark.parametrize(
    ("names", "ranks"),
    each_value(
        ["RANK LOCAL_RANK WORLD_SIZE", "SLURM_PROCID SLURM_LOCALID SLURM_NTASKS"],
        [("0", "0", "error: nope"), ("8", "0", "error: rank 8: nope"), ("9", "1", "error: rank 9: nope")],
    ),
)
def test_every_rank_that_is_not_ended_says_what_is_wrong(names: str, ranks: tuple[str, str, str]) -> None:
    """The first rank of a node reports at once, others after a delay, within which torchrun and our launcher end them."""
    rank, local_rank, told = ranks
    place = dict(zip(names.split(), (rank, local_rank, "16"), strict=True))
    done = copies.run("moefw", "train", "nope.yaml", env=os.environ | place)
    assert done.returncode == 2
    assert done.stderr.startswith(told)
