"""`penstock train` with schedules that have their updates among their ops, in one process."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock as ps
from penstock.cli import main
from penstock.models import CrossEntropy
from penstock.runtime import RuntimeFailure
from penstock.train.asynchronous import ASYNCHRONOUS
from penstock.train.folder import RunFolder
from penstock.train.inputs import gather_inputs
from penstock.train.rank import RankRun
from penstock.train.settings import Settings, learning_rate
from tiers import others_nightly
from train_runs import SMALL, checkpoints, losses, metrics

pytestmark = pytest.mark.unit

Train = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    draw = random.Random(1)
    path.write_text(" ".join(draw.choice(["rank", "stage", "op", "window", "update"]) for _ in range(2000)))
    return path


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def train(tmp_path: Path, text: Path, capfd: Any) -> Train:
    """Trains in this process, into tmp_path/NAME; returns the one JSON object it prints."""

    def call(name: str, options: str, code: int = 0) -> dict[str, Any]:
        resumed = "--resume" in options
        start = "" if resumed else f"{SMALL} --data {text} --out {tmp_path / name} --sample 0"
        assert main(["train", *f"{start} --threads 1 --in-process {options} --json".split()]) == code
        out, err = capfd.readouterr()
        assert err == ""
        value: dict[str, Any] = json.loads(out)
        return value

    return call


def amdp_defaults(text: Path, folder: Path, options: str) -> Settings:
    """The settings of a run whose schedule alone is named."""
    small = SMALL.replace("--microbatches 4 ", "").replace("--batch 8 ", "")
    line = f"{small} --data {text} --out {folder} --steps 2 --sample 0 --threads 1 --in-process --json {options}"
    assert main(["train", *line.split()]) == 0
    return Settings.from_mapping(json.loads((folder / "settings.json").read_text()))


@pytest.mark.slow
def test_amdp_by_its_name_alone_learns_what_1f1b_does(tmp_path: Path, text: Path) -> None:
    """Each stage clipped its own gradient by default, and so a seed ended 1.2% above 1f1b."""
    found = amdp_defaults(text, tmp_path / "amdp", "--schedule amdp --clip 0.5 --steps 6")
    assert (found.microbatches, found.window, found.max_mismatch, found.rule) == (16, None, None, None)
    amdp_defaults(text, tmp_path / "expected", "--schedule 1f1b --clip 0.5 --steps 6")
    like = pytest.approx(losses(tmp_path / "expected"), rel=1e-6)  # gradients are summed in another order
    assert losses(tmp_path / "amdp") == like
    assert any(line["grad_norm"] > 0.5 for line in metrics(tmp_path / "amdp")), "nothing was clipped"
    amdp_defaults(text, tmp_path / "stages", "--schedule amdp --clip 0.5 --steps 6 --max-mismatch 0")
    assert losses(tmp_path / "stages") != like  # where updates are ops, stages still clip by themselves


def test_stages_share_the_clipping_out() -> None:
    """Four stages that each clip by half the norm are together never above it."""
    four = ps.build("amdp", 4, 16, window=16)
    assert Settings(schedule="amdp", window=16, microbatches=16, clip=3.0).clip_norm(four) == 1.5
    assert Settings(clip=3.0).clip_norm(ps.build("1f1b", 4, 8)) == 3.0
    assert Settings(schedule="amdp", window=16, microbatches=16, clip=0.0).clip_norm(four) is None


def test_microbatches_of_amdp_go_as_far_as_the_batch(tmp_path: Path, text: Path) -> None:
    few = amdp_defaults(text, tmp_path / "few", "--schedule amdp --batch 13 --ranks 4")
    assert few.microbatches == 12
    many = amdp_defaults(text, tmp_path / "many", "--schedule amdp --batch 40 --ranks 2")
    assert many.microbatches == 8
    given = amdp_defaults(text, tmp_path / "given", "--schedule amdp --microbatches 4 --window 8 --max-mismatch 1")
    assert (given.microbatches, given.window, given.max_mismatch) == (4, 8, 1)


@pytest.mark.parametrize(
    ("rule", "optimizer"),
    others_nightly(
        [("xpipe", "AdamW"), ("pipedream", "AdamW"), ("spectrain", "SGD"), ("vnag", "NAdam"), ("tentative", "AdamW")],
        [("pipedream", "AdamW"), ("spectrain", "SGD")],
    ),
)
def test_a_rule_of_choice_on_amdps_order(train: Train, tmp_path: Path, rule: str, optimizer: str) -> None:
    """With what the rule needs: the optimizer, and its state on every copy where it predicts."""
    report = train("run", f"--schedule amdp --rule {rule} --steps 4 --drain-every 2")
    updating = report["updating"]
    assert (updating["rule"], updating["proved"], updating["measured"]) == (rule, 1, 1)
    assert updating["one_copy_steps"] == (rule in ("pipedream", "vnag", "tentative"))
    assert any("predicts no weights here" in each for each in report["notices"]) == (rule == "spectrain")
    saved = json.loads((tmp_path / "run/settings.json").read_text())
    assert (saved["rule"], saved["optimizer"]) == (rule, optimizer)
    train("plain", "--schedule amdp --max-mismatch 1 --steps 4 --drain-every 2")
    assert losses(tmp_path / "run") != losses(tmp_path / "plain")
    copy = Path(shutil.copytree(tmp_path / "run", tmp_path / "copy"))
    assert train("copy", f"--resume {copy} --steps 6")["updating"]["rule"] == rule


@pytest.mark.slow
def test_a_rule_that_predicts_with_a_tied_weight_whoever_has_the_optimizers_state(
    train: Train, tmp_path: Path
) -> None:
    """All of this was refused."""
    for sharding in ("none", "copies"):
        options = f"--schedule amdp --rule xpipe --set tied=true --steps 4 --drain-every 2 --sharding {sharding}"
        updating = train(sharding, options)["updating"]
        assert updating["one_copy_steps"] == (sharding == "copies")
        assert updating["versions"] == (3 if sharding == "copies" else 2)
    assert losses(tmp_path / "none") == losses(tmp_path / "copies")
    report = train("spectrain", "--schedule spectrain --set tied=true --steps 4 --drain-every 2")
    assert report["updating"]["rule"] == "spectrain"
    assert len(losses(tmp_path / "spectrain")) == len(losses(tmp_path / "none")) == 4


def test_a_run_keeps_the_mismatch_that_it_began_with(train: Train, tmp_path: Path) -> None:
    """Settings saved before amdp drained by default say nothing of it."""
    train("run", "--schedule amdp --max-mismatch 1 --steps 4 --drain-every 2")
    path = tmp_path / "run/settings.json"
    saved = json.loads(path.read_text()) | {"max_mismatch": None}
    del saved["rule"]
    path.write_text(json.dumps(saved))
    assert train("run", f"--resume {tmp_path / 'run'} --steps 6")["updating"]["measured"] == 1


UPDATES = {"amdp": 8, "pipedream": 32, "pipedream-2bw": 8, "xpipe": 8, "spectrain": 32, "vnag": 32}
"""Of eight steps with four microbatches each, where a window is not given."""


@pytest.mark.slow
@pytest.mark.parametrize("schedule", others_nightly(ASYNCHRONOUS, ["amdp", "pipedream-2bw", "spectrain"]))
def test_the_name_is_enough(train: Train, tmp_path: Path, schedule: str) -> None:
    more = "--drain-every 8" if schedule == "amdp" else ""  # which learns as a synchronous one where nothing is said
    report = train("run", f"--schedule {schedule} --steps 8 --evaluate-every 3 {more}")
    updating = report["updating"]
    assert updating["num_updates"] == UPDATES[schedule]
    mismatch = 0 if schedule == "amdp" else 3 if UPDATES[schedule] == 32 else 1
    assert updating["proved"] == updating["measured"] == mismatch
    assert (updating["drain_every"], updating["window"]) == (8, 32 // UPDATES[schedule])
    built = ps.load(tmp_path / "run/schedule.txt")
    assert built.num_microbatches == 32
    assert max(ps.schedule.count_mismatch(built).values()) == updating["proved"]
    assert updating["versions"] == max(ps.schedule.count_versions(built).values())
    assert len(report["state"]) == 4
    assert all(rank["parameters"] > 0 for rank in report["state"])

    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(8))
    assert [line["updates"] for line in lines] == [(step + 1) * UPDATES[schedule] // 8 for step in range(8)]
    peak = 0.03 if schedule == "spectrain" else 4e-3
    assert [line["lr"] for line in lines] == [learning_rate(step, 8, peak, 30, "cosine") for step in range(8)]
    assert ["validation_loss" in line for line in lines] == [False] * 7 + [True]
    assert report["train_loss"] == lines[-1]["loss"]
    assert report["timing"]["simulated_makespan"] > 0
    assert any("was for each stage's gradient by itself" in notice for notice in report["notices"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    others_nightly(
        ["--window 8", "--max-mismatch 1", "--drain-every 8 --sharding none", "--drain-every 2"],
        ["--max-mismatch 1", "--drain-every 2"],
    ),
)
def test_options_of_amdp(train: Train, tmp_path: Path, options: str) -> None:
    updating = train("run", f"--schedule amdp --steps 8 {options}")["updating"]
    assert updating["num_updates"] == (4 if "window" in options else 8)
    assert updating["proved"] == updating["measured"] == (1 if "mismatch 1" in options else 0)
    assert updating["one_copy_steps"] == ("sharding" not in options)
    assert updating["drain_every"] == (2 if "drain-every 2" in options else 8)
    if "sharding" in options:  # which copy steps changes no number
        train("on", "--schedule amdp --steps 8 --max-mismatch 0")
        assert losses(tmp_path / "run") == losses(tmp_path / "on")


def test_without_mismatch_it_is_the_synchronous_run(train: Train, tmp_path: Path) -> None:
    """A pass of one window reads nothing else than 1f1b does; to the bit."""
    train("expected", "--schedule 1f1b --steps 4 --clip 0")
    for rule in ("pipedream", "xpipe"):
        report = train(rule, f"--schedule {rule} --window 4 --drain-every 1 --steps 4 --clip 0")
        assert (report["updating"]["proved"], report["updating"]["measured"]) == (0, 0)
        assert losses(tmp_path / rule) == losses(tmp_path / "expected")


def test_a_window_that_two_passes_fill(train: Train, tmp_path: Path) -> None:
    """It is the step of a batch twice as large."""
    constant = "--set lr_decay=constant --set lr_warmup=0 --clip 0"
    train("expected", f"--schedule 1f1b --steps 3 --batch 16 --microbatches 8 {constant}")
    report = train("run", f"--schedule pipedream --window 8 --drain-every 1 --steps 6 {constant}")
    assert report["updating"]["num_updates"] == 3
    assert [line["updates"] for line in metrics(tmp_path / "run")] == [0, 1, 1, 2, 2, 3]
    found = losses(tmp_path / "run")
    means = [(a + b) / 2 for a, b in zip(found[::2], found[1::2], strict=True)]
    assert means == pytest.approx(losses(tmp_path / "expected"), abs=1e-6)
    evaluated = [metrics(tmp_path / name)[-1]["validation_loss"] for name in ("run", "expected")]
    assert evaluated[0] == pytest.approx(evaluated[1], abs=1e-6)


def test_steps_are_rounded_up_to_whole_passes(train: Train, tmp_path: Path) -> None:
    report = train("run", "--schedule amdp --steps 5 --drain-every 2")
    assert report["steps"] == 6 == len(losses(tmp_path / "run"))
    assert "5 steps were asked for, 6 were run: whole passes and windows, of 2 steps" in report["notices"]
    assert json.loads((tmp_path / "run/settings.json").read_text())["steps"] == 6
    again = train("run", f"--resume {tmp_path / 'run'}")
    assert (again["steps"], again["train_loss"]) == (6, None)
    assert again["loss"] == report["loss"]


def back_to(folder: Path, steps: int) -> Path:
    """A copy of a run as if it had been killed after the checkpoint of so many steps, with lines written since."""
    copy = Path(shutil.copytree(folder, folder.with_name(f"back-to-{steps}")))
    for each in sorted((copy / "checkpoints").iterdir()):
        meta = json.loads((each / "manifest.json").read_text())["manifest"]["meta"]
        if meta["steps"] > steps:
            shutil.rmtree(each)
    return copy


RESUMED = {
    "amdp": "--schedule amdp --max-mismatch 1 --set dropout=0.1",
    "no ZeRO": "--schedule amdp --max-mismatch 1 --sharding none",
    "pipedream": "--schedule pipedream",
    "2bw": "--schedule pipedream-2bw",
    "xpipe": "--schedule xpipe",
    "spectrain": "--schedule spectrain",
    "vnag": "--schedule vnag",
    "amid a window": "--schedule amdp --max-mismatch 1 --window 16",
}


@pytest.mark.parametrize("how", others_nightly(RESUMED, ["amdp", "vnag", "amid a window"]))
def test_resumed_after_any_pass(train: Train, tmp_path: Path, how: str) -> None:
    train("run", f"{RESUMED[how]} --steps 4 --drain-every 2 --save-every 2")
    copy = back_to(tmp_path / "run", 2)
    train("again", f"--resume {copy}")
    assert losses(copy) == losses(tmp_path / "run")
    updates = [[line["updates"] for line in metrics(folder)] for folder in (copy, tmp_path / "run")]
    assert updates[0] == updates[1]


@pytest.mark.slow
def test_resumed_elsewhere(train: Train, tmp_path: Path) -> None:
    """Amid a window, and under another number of ranks: what is read does not depend on them where nothing is
    updated within a pass."""
    train("run", "--schedule pipedream --window 16 --drain-every 1 --steps 8 --save-every 1 --set keep=9 --clip 0")
    copy = back_to(tmp_path / "run", 2)
    report = train("again", f"--resume {copy} --ranks 2 --drain-every 2")
    assert report["updating"]["num_updates"] == 2
    assert losses(copy) == losses(tmp_path / "run")
    early = back_to(tmp_path / "run", 1)
    for wrong in ("--window 8", "--drain-every 2", "--schedule 1f1b"):
        told = train("wrong", f"--resume {early} {wrong}", code=2)["error"]["message"]
        assert "at step 1, and 4 of the 16 microbatches of a window are gathered" in told


@pytest.mark.usefixtures("interruptible")
def test_interrupted(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends after the pass."""
    plain, calls = CrossEntropy.__call__, 0

    def pressed(self: CrossEntropy, logits: Any, targets: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 11:  # in the second pass
            os.kill(os.getpid(), signal.SIGINT)
        return plain(self, logits, targets)

    monkeypatch.setattr(CrossEntropy, "__call__", pressed)
    report = train("run", "--schedule amdp --drain-every 2 --window 16 --steps 80", code=130)
    assert (report["interrupted"], report["steps"]) == (True, 4)
    assert checkpoints(tmp_path / "run") == ["step-00000004"]
    assert len(losses(tmp_path / "run")) == 4
    assert train("run", f"--resume {tmp_path / 'run'} --steps 8")["updating"]["num_updates"] == 2


@pytest.mark.slow
def test_from_synchronous_to_asynchronous_and_back(train: Train, tmp_path: Path) -> None:
    train("run", "--schedule zb-v --steps 2")
    folder = tmp_path / "run"
    assert (
        train("run", f"--resume {folder} --schedule amdp --drain-every 2 --steps 6")["updating"]["num_updates"] == 6
    )
    assert len(losses(folder)) == 6
    report = train("run", f"--resume {folder} --schedule 1f1b --ranks 2 --steps 8")
    assert report["updating"] is None
    assert len(losses(folder)) == 8
    assert checkpoints(folder)[-1] == "step-00000008"


def test_a_schedule_file_says_its_windows(train: Train, tmp_path: Path, text: Path) -> None:
    ps.save(ps.build("amdp", 4, 16, window=8), tmp_path / "mine.json")
    report = train("run", f"--schedule {tmp_path / 'mine.json'} --microbatches 8 --steps 2")
    assert (report["updating"]["window"], report["updating"]["drain_every"]) == (8, 2)
    small = SMALL.replace("--microbatches 4", "")
    line = f"{small} --data {text} --schedule {tmp_path / 'mine.json'} --steps 2 --in-process --json"
    assert main(["train", *line.split(), "--out", str(tmp_path / "other")]) == 0
    assert json.loads((tmp_path / "other/settings.json").read_text())["microbatches"] == 8


@pytest.mark.slow
def test_a_pass_that_breaks_off(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """Some updates of the pass were made: nothing but loading goes on from there, and then as if it had not been."""
    options = (
        f"{SMALL} --data {text} --schedule amdp --max-mismatch 1 --steps 6 --drain-every 2 --save-every 2 --sample 0"
    )
    line = f"{options} --threads 1 --in-process --json"
    assert main(["train", *line.split(), "--out", str(tmp_path / "whole")]) == 0
    expected = losses(tmp_path / "whole")

    plain, calls = CrossEntropy.__call__, 0

    def fails(self: CrossEntropy, logits: Any, targets: Any) -> Any:
        nonlocal calls
        calls += len(targets) == 2  # and not for two microbatches, which the first pass compares
        if calls == 8 + 7:  # the seventh microbatch of the second pass
            raise ValueError("no loss today")
        return plain(self, logits, targets)

    monkeypatch.setattr(CrossEntropy, "__call__", fails)
    told = {"preset": "nano", "depth": 6, "width": 16, "heads": 2, "context": 16, "batch": 8, "microbatches": 4}
    told |= {"schedule": "amdp", "window": 4, "drain_every": 2, "steps": 6, "save_every": 2, "evaluate_every": 0}
    settings = Settings.from_mapping(told | {"sample": 0, "threads": 1, "in_process": True, "data": str(text)})
    folder = RunFolder(tmp_path / "run")
    run = RankRun(gather_inputs(settings), folder, first=True, quiet=True)
    with pytest.raises(RuntimeFailure, match="no loss today"):
        run.run()
    assert run.training.steps == 2
    evaluate = partial(run.training.evaluate, run.inputs.data.validation)
    for go_on in (run.save, run.training.run_pass, evaluate):
        with pytest.raises(RuntimeFailure, match=r"an earlier step broke off \(.*no loss today.*load"):
            go_on()
    run.resume("step-00000002")
    run.run()
    assert losses(tmp_path / "run") == expected
