"""`penstock train --adapt`: a link is late, the plan changes while it trains, and the losses are the same."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path

import pytest

from penstock.cli import main
from train_runs import ENDLESS, Run, losses, metrics

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds the ranks by /proc"),
]

TINY = (
    "--preset nano --depth 6 --width 16 --heads 2 --context 16 --batch 16 --microbatches 8 --evaluate-every 0 "
    f"--sample 0 --save-every 0 --schedule zb --ranks 4 --threads 1 {ENDLESS}"
)

LATE = 60
"""Milliseconds of the late link: many times what an op of this model takes."""


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    draw = random.Random(1)
    path.write_text(" ".join(draw.choice(["rank", "stage", "link", "op", "slack", "plan"]) for _ in range(3000)))
    return path


@pytest.mark.usefixtures("interruptible")
@pytest.mark.slow
def test_the_plan_changes_and_the_losses_do_not(tmp_path: Path, text: Path) -> None:
    """The run is interrupted once three steps have run another plan, however long that takes on a busy machine."""
    plain, late = tmp_path / "plain", tmp_path / "late"
    with Run(late, f"{TINY} --data {text} --out {late} --adapt --link 2:3=latency:{LATE}ms --json") as run:
        run.wait_for(lambda: sum(row["plan"] > 0 for row in metrics(late)) >= 3)
        run.signal(signal.SIGINT)
        ended = run.end()
    assert ended.code == 128 + signal.SIGINT, ended.err
    num_steps = len(losses(late))
    options = f"{TINY} --steps {num_steps} --data {text} --in-process --out {plain} --json"
    assert main(["train", *options.split()]) == 0
    assert losses(late) == losses(plain)

    report = ended.json
    assert report == json.loads((late / "report.json").read_text())
    steered = report["steered"]
    slow = {link for link, ms in steered["links"].items() if ms >= LATE}
    assert {"2>3", "3>2"} <= slow
    assert steered["decisions"], "readiness or another plan saves a third of each step"
    first = steered["decisions"][0]
    assert first["ms_then"] < first["ms_now"]
    assert first["first"] is not None
    plans = [row["plan"] for row in metrics(late)]
    assert plans[0] == 0
    assert plans == sorted(plans)
    assert plans[-1] >= 1
    assert (late / "control.jsonl").exists()
