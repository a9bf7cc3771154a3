"""Asynchronous runs over processes that are killed, and go on: the losses of a run that nobody disturbed."""

from __future__ import annotations

import contextlib
import json
import os
import random
from pathlib import Path

import pytest
import torch

from penstock.cli import main
from train_runs import ENDLESS, SMALL, Run, losses, metrics

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds the ranks by /proc"),
    pytest.mark.timeout(500),
]

DIES = """
# Rank 2 owns stage 2. It has the window's gradients, has made its update, and dies before the others hear of it.
# Ranks are forked from a process that knows no rank, so each asks for its own when it steps.
import os, signal
import torch

step, calls = torch.optim.AdamW.step, 0

def dying(self, *args, **kwargs):
    global calls
    step(self, *args, **kwargs)
    calls += os.environ.get("RANK") == "2"
    if calls == 6:
        os.kill(os.getpid(), signal.SIGKILL)

torch.optim.AdamW.step = dying
"""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    draw = random.Random(1)
    path.write_text(" ".join(draw.choice(["rank", "stage", "op", "window", "update"]) for _ in range(2000)))
    return path


def in_process(options: str) -> None:
    """A run, or the rest of one, with all ranks in this process."""
    threads = torch.get_num_threads()
    try:
        assert main(["train", *f"{options} --in-process --threads 1 --json".split()]) == 0
    finally:
        torch.set_num_threads(threads)


@pytest.mark.nightly
def test_an_owner_that_dies_between_reduce_and_broadcast(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = (
        f"{SMALL} --schedule amdp --max-mismatch 1 --drain-every 2 --steps 8 --save-every 2 --data {text} --sample 0"
    )
    in_process(f"{options} --out {tmp_path / 'whole'}")
    folder = tmp_path / "run"
    (tmp_path / "faults").mkdir()
    (tmp_path / "faults/sitecustomize.py").write_text(DIES)
    paths = [str(tmp_path / "faults"), *filter(None, [os.environ.get("PYTHONPATH")])]
    with monkeypatch.context() as changed:
        changed.setenv("PYTHONPATH", os.pathsep.join(paths))
        with Run(folder, f"{options} --out {folder}") as run:
            run.wait_for(lambda: run.steps() >= 2)
            run.ranks()
            ended = run.end()
    assert ended.code == 137, ended
    said = ended.err[ended.err.index("penstock: ") :].splitlines()
    assert said[0].startswith("penstock: rank 2 was killed by SIGKILL")
    assert said[-1] == f"its last checkpoint is kept: go on with penstock train --resume {folder}"
    assert len(said) <= 3, said
    assert len(losses(folder)) == 4  # the third of four passes was not ended
    in_process(f"--resume {folder}")
    assert losses(folder) == losses(tmp_path / "whole")


@pytest.mark.nightly
def test_killed_amid_a_window(text: Path, tmp_path: Path) -> None:
    """Two passes fill a window. What is gathered of one lies in the checkpoint, on each rank its part."""
    amid = "--schedule amdp --max-mismatch 1 --window 16 --drain-every 2"
    options = f"{SMALL} {amid} {ENDLESS} --save-every 2 --data {text}"
    folder = tmp_path / "run"
    with Run(folder, f"{options} --out {folder}") as run:
        # Amid a window: of this pass the checkpoint is there, and of the next not yet.
        run.wait_for(lambda: run.steps() >= 6 and gathered(folder) > 0)
        run.kill(1)
        ended = run.end()
    assert ended.code == 137
    assert "rank 1 was killed by SIGKILL" in ended.err
    windows = len(metrics(folder)) // 4 + 2
    with Run(folder, f"--resume {folder} --steps {4 * windows} --json") as run:
        ended = run.end()
    assert ended.code == 0, ended.err
    assert ended.json["updating"]["num_updates"] == windows
    assert ended.json["updating"]["measured"] == 0
    in_process(f"{options} --steps {4 * windows} --out {tmp_path / 'whole'}")
    assert losses(folder) == losses(tmp_path / "whole")


def gathered(folder: Path) -> int:
    """Microbatches in the open window of the newest checkpoint; 0 where there is none, or it is just removed."""
    with contextlib.suppress(OSError, ValueError):
        newest = max(path for path in (folder / "checkpoints").iterdir() if not path.name.startswith("."))
        return int(json.loads((newest / "manifest.json").read_text())["manifest"]["meta"]["gathered"])
    return 0
