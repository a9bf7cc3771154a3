"""The same failures under torchrun: the rank that failed first speaks, the others say a line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from processes import printed_by

pytestmark = [pytest.mark.multiproc]

HEAD = """
import os, sys
import torch
import torch.distributed as dist
from penstock.runtime.launch import init_process
rank, num_ranks = init_process(timeout=200.0)
assert dist.get_rank() == rank and dist.get_world_size() == num_ranks
"""


def run(
    tmp_path: Path, body: str, num_ranks: int = 2, head: str = HEAD, max_restarts: int = 0
) -> tuple[int, str, list[str]]:
    """Exit code, stdout, and the lines of stderr that are not torchrun's own."""
    script = tmp_path / "ranks.py"
    script.write_text(head + body)
    words = ["--standalone", f"--nproc-per-node={num_ranks}", f"--max-restarts={max_restarts}"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words, str(script)],
        capture_output=True,
        text=True,
        timeout=250,
    )
    return done.returncode, done.stdout, [line for line in done.stderr.splitlines() if line.startswith("penstock:")]


@pytest.mark.nightly  # by day tests/multiproc/test_launch.py has it, of ranks that penstock launches
def test_an_exception(tmp_path: Path) -> None:
    body = "if rank == 1: raise ValueError('too wide')\ndist.recv(torch.zeros(1), 1)\n"
    code, _, mine = run(tmp_path, body)
    assert code == 1
    assert mine.count("penstock: rank 1 failed: ValueError: too wide") == 1
    others = [line for line in mine if "failed: " not in line]
    assert set(others) <= {"penstock: rank 0 ended because rank 1 failed"}


def test_a_plain_process_is_a_rank_of_one(tmp_path: Path) -> None:
    script = tmp_path / "alone.py"
    script.write_text(HEAD + "print(rank, num_ranks)")
    assert printed_by(script) == "0 1\n"
    assert script.with_suffix(".err").read_text() == ""


@pytest.mark.slow
def test_a_silent_rank_ended_the_one_that_was_to_say_what_was_wrong(tmp_path: Path) -> None:
    """torchrun ends all ranks when one has ended. Rank 1 gets there first, and must leave rank 0 time to speak."""
    body = f"""
import time
from pathlib import Path
from types import SimpleNamespace
from penstock.train import command

leaves_time = Path({str(tmp_path / "leaves time")!r})

def leave_time(seconds):
    assert seconds == command.LET_SPEAK
    leaves_time.touch()
    time.sleep(200)  # until torchrun ends it

command.time = SimpleNamespace(sleep=leave_time)
while rank == 0 and not leaves_time.exists():
    time.sleep(0.01)
sys.exit(command.run_command(["--schedule", "1fb1", "--out", "run"]))
"""
    code, _, mine = run(tmp_path, body)
    assert code == 1
    assert mine == ["penstock: no schedule named '1fb1'; did you mean 1f1b?"]
    assert (tmp_path / "leaves time").exists()


@pytest.mark.slow
def test_one_restart_is_enough_after_a_kill(tmp_path: Path) -> None:
    """A rank that starts first does not connect to the address of the process that was killed."""
    body = """
if not is_restarted:
    if rank == 1:
        os.kill(os.getpid(), 9)
    dist.recv(torch.zeros(1), 1)
print(rank, flush=True)
"""
    late = """
import os, time
is_restarted = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
if is_restarted and os.environ["RANK"] == "1":
    time.sleep(2.0)
"""
    code, out, _ = run(tmp_path, body, head=late + HEAD, max_restarts=1)
    assert (code, sorted(out.split())) == (0, ["0", "1"])
