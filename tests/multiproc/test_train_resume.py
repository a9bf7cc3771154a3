"""Runs that are killed and go on: the same losses, to the last digit, as a run never interrupted."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from crashes import needs_small_disk, small_disk
from listening import family, runs
from penstock.cli import main
from tiers import others_nightly
from train_runs import ENDLESS, SMALL, Run, checkpoints, losses, metrics
from waiting import wait_until

pytestmark = [
    pytest.mark.multiproc,
    pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds the ranks by /proc"),
    pytest.mark.timeout(600),
]

MORE = 6
"""Steps that a run makes after its last break."""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    draw = random.Random(1)
    words = ["rank", "stage", "link", "op", "slack", "bubble", "makespan", "plan", "prove", "draw", "run"]
    path.write_text(" ".join(draw.choice(words) for _ in range(3000)))
    return path


def uninterrupted(folder: Path, options: str) -> list[float]:
    """The losses of a run that nobody disturbs, in this process; other tests show it equals four processes."""
    threads = torch.get_num_threads()
    try:
        assert main(["train", *f"{options} --in-process --threads 1 --out {folder} --json".split()]) == 0
    finally:
        torch.set_num_threads(threads)
    return losses(folder)


@pytest.mark.nightly
def test_killed_again_and_again(text: Path, tmp_path: Path) -> None:
    """Each part runs under another schedule, number of ranks and dispatch, and is killed at a random moment."""
    options = f"{SMALL} {ENDLESS} --save-every 3 --data {text}"
    folder = tmp_path / "run"
    # Each rank takes seconds to start, so that there are few where many would show no more.
    parts = ["", "--schedule zb-v --ranks 4", "--dispatch dynamic --ranks 2", "--schedule 1f1b --dispatch frozen"]
    num_ranks = [2, 4, 2, 2]
    seed = time.time_ns()
    draw = random.Random(seed)
    with Run(folder, f"{options} --ranks 2 --out {folder}") as run:
        # Killed before the first checkpoint, it goes on from the start.
        run.wait_for(lambda: run.steps() >= 1)
        _killed(run, 1, resumable=None)
    for part, num in zip(parts, num_ranks, strict=True):
        done = 3 * (len(losses(folder)) // 3)
        rank, step = draw.randrange(num), done + draw.randrange(4, 7)
        with Run(folder, f"--resume {folder} {part}") as run:
            run.wait_for(lambda run=run, step=step: run.steps() >= step)
            if "dynamic" in part:  # during the writing of a checkpoint
                run.wait_for(lambda: any(name.endswith(".writing") for name in checkpoints(folder)))
            _killed(run, rank, resumable=True)
        print(f"{part!r} killed rank {rank} at step {step}; seed {seed}")
    num = len(losses(folder)) + MORE
    assert main(["train", *f"--resume {folder} --ranks 1 --in-process --steps {num} --json".split()]) == 0
    assert len(losses(folder)) == num
    assert losses(folder) == uninterrupted(tmp_path / "whole", f"{options} --steps {num}")
    assert not any(name.startswith(".") for name in checkpoints(folder))


def _killed(run: Run, rank: int, resumable: bool | None) -> None:
    run.kill(rank)
    ended = run.end()
    assert ended.code == 137, ended
    assert ended.out == ""
    said = ended.err[ended.err.index("penstock: ") :].splitlines()
    assert said[0].startswith(f"penstock: rank {rank} was killed by SIGKILL")
    if resumable:
        assert said[1] == f"its last checkpoint is kept: go on with penstock train --resume {run.folder}"
    assert len(said) <= 2, said
    assert "Traceback" not in ended.err


@pytest.mark.slow
def test_killed_with_all_that_has_state(text: Path, tmp_path: Path) -> None:
    """Dropout, tied embedding and head on different ranks, momentum and recomputation."""
    options = (
        f"{SMALL} {ENDLESS} --save-every 3 --data {text} --set dropout=0.2 --set tied=true --recompute "
        '--optimizer SGD --set optimizer_options={"momentum":0.9,"nesterov":true}'
    )
    folder = tmp_path / "run"
    with Run(folder, f"{options} --out {folder} --schedule zb-h1 --ranks 3") as run:
        run.wait_for(lambda: run.steps() >= 5)
        _killed(run, 0, resumable=True)
    num = len(losses(folder)) + MORE
    with Run(folder, f"--resume {folder} --schedule 1f1b --ranks 2 --steps {num}") as run:
        assert run.end().code == 0
    assert len(losses(folder)) == num
    assert losses(folder) == uninterrupted(tmp_path / "whole", f"{options} --steps {num}")


@pytest.mark.nightly
@pytest.mark.parametrize(
    "how",
    [
        "--ranks 2 --transport direct",
        "--ranks 2 --transport delegate",
        "--ranks 2 --adapt",
        "--ranks 2 --transport direct --adapt",
        "--pp 2 --dp 2",
        "--pp 1 --tp 2",
    ],
)
def test_killed_under_every_transport_and_mesh(text: Path, tmp_path: Path, how: str) -> None:
    """One message, and soon neither a rank nor a delegate nor a controller is left."""
    folder = tmp_path / "run"
    with Run(folder, f"{SMALL} {ENDLESS} --save-every 2 --data {text} --out {folder} {how}") as run:
        run.wait_for(lambda: run.steps() >= 3)
        started = {pid for rank in run.ranks().values() for pid in family(rank)}
        _killed(run, 1, resumable=True)
    assert len(started) >= 2
    # A controller ends by itself once its rank is gone, for which a busy machine takes a moment.
    wait_until(lambda: not any(map(runs, started)), lambda: f"{[*filter(runs, started)]} run", seconds=10)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.slow
@pytest.mark.parametrize("number", others_nightly([signal.SIGINT, signal.SIGTERM], [signal.SIGINT]))
def test_a_signal_saves_and_ends_well(text: Path, tmp_path: Path, number: signal.Signals) -> None:
    options = f"{SMALL} {ENDLESS} --save-every 0 --data {text} --ranks 2"
    folder = tmp_path / "run"
    with Run(folder, f"{options} --out {folder}") as run:
        run.wait_for(lambda: run.steps() >= 3)
        run.signal(number)
        ended = run.end()
    assert ended.code == 128 + number, ended
    done = len(losses(folder))
    assert done >= 3
    assert f"stopping after step {done}: saving a checkpoint" in ended.err
    assert f"interrupted after {done} steps" in ended.out
    assert f"penstock train --resume {folder}" in ended.out
    assert "Traceback" not in ended.err
    assert checkpoints(folder) == [f"step-{done:08d}"]
    assert json.loads((folder / "report.json").read_text())["interrupted"] is True
    assert main(["train", *f"--resume {folder} --in-process --steps {done + MORE} --json".split()]) == 0
    assert len(losses(folder)) == done + MORE
    assert losses(folder) == uninterrupted(tmp_path / "whole", f"{options} --steps {done + MORE}")


@pytest.mark.slow
def test_a_run_in_the_background_ends_by_sigterm_alone(text: Path, tmp_path: Path) -> None:
    """Started as a shell and nohup start it, Ctrl-C and a closed terminal do nothing, and SIGTERM ends it well."""
    folder = tmp_path / "run"
    options = f"{SMALL} {ENDLESS} --save-every 0 --data {text} --ranks 2 --out {folder}"
    with Run(folder, options, ignored=(signal.SIGINT, signal.SIGHUP)) as run:
        run.wait_for(lambda: run.steps() >= 2)
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGINT):
            run.signal(number)
            before = run.steps()
            run.wait_for(lambda before=before: run.steps() >= before + 2)  # type: ignore[misc]
        run.signal(signal.SIGTERM)
        ended = run.end()
    assert ended.code == 143, ended
    done = len(losses(folder))
    assert f"stopping after step {done}: saving a checkpoint" in ended.err
    assert ended.err.endswith("penstock: stopped by SIGTERM\n")
    assert "Traceback" not in ended.err
    assert checkpoints(folder) == [f"step-{done:08d}"]
    assert json.loads((folder / "report.json").read_text())["interrupted"] is True


def worked(pids: Iterable[int]) -> float:
    """Seconds of a processor that each of some processes has had at least."""
    ticks = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13] for pid in pids]
    return min(sum(map(int, each)) for each in ticks) / os.sysconf("SC_CLK_TCK")


@pytest.mark.slow
@pytest.mark.usefixtures("interruptible")
def test_a_second_interrupt_ends_at_once(text: Path, tmp_path: Path) -> None:
    """Steps too long to wait for: a million tokens each."""
    folder = tmp_path / "run"
    with Run(folder, f"{SMALL} --steps 9 --batch 60000 --data {text} --ranks 2 --out {folder}") as run:
        run.wait_for(lambda: folder.joinpath("metrics.jsonl").exists() and len(run.ranks()) == 2)
        ranks = run.ranks().values()

        def work() -> None:
            before = worked(ranks)
            run.wait_for(lambda: worked(ranks) > before + 0.2)

        work()  # now all are in their first step
        run.signal(signal.SIGINT)
        work()  # which the first signal does not end
        done = len(metrics(folder))

        def pressed() -> bool:
            """Whether it ends: of two signals that come before a busy process looks, it sees one."""
            run.signal(signal.SIGINT)
            return run.over(within=2.0)

        wait_until(pressed, lambda: f"ranks {run.ranks()} still run")
        ended = run.end()
    assert len(metrics(folder)) == done, "it waited for a step to end"
    assert ended.code == 130
    assert ended.err.splitlines()[-1] == "penstock: stopped by SIGINT"
    assert "Traceback" not in ended.err


@pytest.mark.nightly
def test_torchrun(text: Path, tmp_path: Path) -> None:
    """Ranks that torchrun starts agree on a free folder, and give the same losses."""
    options = f"{SMALL} --steps 6 --data {text} --sample 0"
    (tmp_path / "runs" / "nano-1f1b-2").mkdir(parents=True)
    folder = tmp_path / "runs" / "nano-1f1b-2-2"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "penstock.train"]
    with Run(folder, f"{options} --json", torchrun, tmp_path) as run:
        ended = run.end()
    assert ended.code == 0, ended.err
    assert ended.json["num_ranks"] == 2
    assert [p.name for p in (tmp_path / "runs").iterdir() if any(p.iterdir())] == ["nano-1f1b-2-2"]
    assert losses(folder) == uninterrupted(tmp_path / "whole", options)
    with Run(folder, f"{options} --ranks 2 --preset tny", torchrun, tmp_path) as run:
        ended = run.end()
    assert ended.code != 0
    said = [line for line in ended.err.splitlines() if line.startswith("penstock:")]
    assert said == ["penstock: no preset named 'tny'; did you mean tiny?"]


FULL = """
import json, os, subprocess, sys
from pathlib import Path
from penstock.cli import main

disk, options = Path(sys.argv[1]), sys.argv[2]
folder, filler = disk / "run", disk / "filler"
assert main(["train", *f"{options} --steps 4 --ranks 2 --threads 1 --out {folder}".split()]) == 0
held = os.listdir(folder / "checkpoints")
with open(filler, "wb") as file:
    os.posix_fallocate(file.fileno(), 0, (os.statvfs(disk).f_bavail - 24) * 4096)
code = "import sys; from penstock.cli import main; sys.exit(main())"
line = f"train --resume {folder} --steps 12".split()
failed = subprocess.run([sys.executable, "-c", code, *line], capture_output=True, text=True)
kept = os.listdir(folder / "checkpoints")
filler.unlink()
assert main(["train", *f"--resume {folder} --steps 12 --in-process".split()]) == 0
lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
said = {"code": failed.returncode, "err": failed.stderr, "held": held, "kept": kept}
print(json.dumps(said | {"losses": [line["loss"] for line in lines]}))
"""


@pytest.mark.nightly  # as ranks whose disk is full in test_faults
@needs_small_disk
def test_a_full_disk_ends_a_run_that_goes_on_when_there_is_space(text: Path, tmp_path: Path) -> None:
    options = f"{SMALL} --save-every 2 --set keep=1 --set lr_decay=constant --data {text}"
    disk = tmp_path / "disk"
    disk.mkdir()
    (tmp_path / "script.py").write_text(FULL)
    command = [*small_disk(disk, "2m"), sys.executable, str(tmp_path / "script.py"), str(disk), options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["code"] == 1, said["err"]
    assert "Traceback" not in said["err"]
    assert "could not be written: No space left on device" in said["err"]
    assert f"its last checkpoint is kept: go on with penstock train --resume {disk}/run" in said["err"]
    assert said["held"] == said["kept"] == ["step-00000004"]
    assert said["losses"] == uninterrupted(tmp_path / "whole", f"{options} --steps 12")
