"""Checkpoints when a process is killed at any of its touches of the disk, or the disk is full at any page."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from crashes import needs_small_disk, small_disk
from processes import printed_by
from tiers import sample

pytestmark = [pytest.mark.unit, pytest.mark.timeout(900)]  # hundreds of times the disk is waited for

TESTS = Path(__file__).parents[1]

BEGIN = """
import multiprocessing, os, sys, threading
from pathlib import Path
import torch
from penstock.runtime.checkpoint import CheckpointError, Reader, latest
from penstock.runtime.checkpoint.dcp import write
from checkpoint_cases import on_ranks

torch.set_num_threads(1)
folder = Path(sys.argv[1])


def tensors(number, rank):
    return {f"model/{rank}.{i}": torch.full((40, 16), float(number * 10 + i)) for i in range(3)}


def check(number):
    "The newest checkpoint is whole, and one of these numbers."
    newest = latest(folder)
    reader = Reader(newest)
    reader.require_complete()
    dict(reader)  # reads all of it
    assert reader.meta["number"] in number, (reader.meta, number)
    for rank in range(2):
        held = reader.load(tensors(0, rank))
        assert all(torch.equal(held[n], t) for n, t in tensors(reader.meta["number"], rank).items())
    return reader.meta["number"]


def save_as(peers, step, number):
    write(folder, step, tensors(number, peers.here[0]), {"number": number}, peers=peers, keep=2)


def save(step, number):
    "By two threads of this process; returns their errors."
    return [str(error) for error in on_ranks(2, lambda peers: save_as(peers, step, number)) if error is not None]
"""

KILLS = (
    BEGIN
    + """
import shutil
from crashes import kill_at
from penstock.runtime.mesh.peers import Peers

context = multiprocessing.get_context("fork")


class PipePeers(Peers):
    "Two processes, each with its end of a pipe."

    def __init__(self, rank, end):
        self.here, self.num_ranks, self.end = (rank,), 2, end

    def gather(self, value):
        self.end.send(value)
        other = self.end.recv()
        return [value, other] if self.here[0] == 0 else [other, value]


def killed(number, step, victim, touch):
    "Whether the victim came to so many touches while both saved."
    ends = context.Pipe()

    def rank_process(rank):
        ends[1 - rank].close()
        if rank == victim:
            kill_at(touch, folder)
        try:
            save_as(PipePeers(rank, ends[rank]), step, number)
        except (EOFError, OSError):
            os._exit(3)
        os._exit(0)

    children = [context.Process(target=rank_process, args=(rank,)) for rank in range(2)]
    [child.start() for child in children]
    [end.close() for end in ends]
    [child.join() for child in children]
    ended = children[victim].exitcode
    assert ended in (0, -9), ended
    return ended == -9


total, every = 0, int(sys.argv[2])
for victim in range(2):
    for replaced in (False, True):
        touch = 1 + (victim + replaced) % every - every
        while True:
            touch += every
            shutil.rmtree(folder, ignore_errors=True)
            for step in (1, 2):
                assert save(step, step) == []
            died = killed(7, 2 if replaced else 3, victim, touch)
            found = check((2, 7) if died else (7,))
            assert save(4, 4) == []
            check((4,))
            left = sorted(path.name for path in folder.iterdir())
            assert len(left) == 2 and left[1] == "step-00000004", (left, touch)
            total += died
            if not died:
                break
print(total)
"""
)


EVERY = sample(1, 2)
"""Of the touches of the disk one in so many is the last of a process. Which ones, differs between the cases."""


def num_struck(script: str, tmp_path: Path) -> int:
    """How many processes were killed before they had done all."""
    path = tmp_path / "script.py"
    path.write_text(script)
    return int(printed_by(path, str(tmp_path / "run"), str(EVERY), deadline=850))


@pytest.mark.slow
def test_killed_at_every_touch_of_the_disk_while_saving(tmp_path: Path) -> None:
    """Either of two ranks, a new checkpoint or one that replaces another: the newest is whole at every moment."""
    assert num_struck(KILLS, tmp_path) > 50 / EVERY


LOADS = """
import multiprocessing, os, sys
from pathlib import Path
import torch
from torch import nn
import penstock as ps
from penstock.runtime.checkpoint import latest
from checkpoint_cases import flip_tensor
from crashes import kill_at
from penstock.runtime.mesh.peers import Peers

torch.set_num_threads(1)
folder = Path(sys.argv[1])


def pipeline():
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    return ps.Pipeline(net, ps.build("1f1b", 2, 2), loss_fn=nn.MSELoss(), optimizer=torch.optim.AdamW)


pipe = pipeline()
for step in range(3):
    pipe.step(torch.ones(2, 3), torch.ones(2, 3))
    pipe.save(folder, keep=3)
flip_tensor(folder / "step-00000003")
every = int(sys.argv[2])
touch, total = 1 - every, 0
while True:
    touch += every
    child = os.fork()
    if child == 0:
        kill_at(touch, folder)
        pipeline().load(folder, fallback=True)
        os._exit(0)
    died = os.waitpid(child, 0)[1] == 9
    pipe = pipeline()
    pipe.load(folder / "step-00000002")
    pipe.load(folder, fallback=True)
    assert pipe.num_steps == 2
    aside = folder / "step-00000003.damaged"
    assert aside.is_dir() and latest(folder).name == "step-00000002"
    aside.rename(folder / "step-00000003")
    total += died
    if not died:
        break
print(total)
"""


@pytest.mark.slow
def test_killed_at_every_touch_of_the_disk_while_loading(tmp_path: Path) -> None:
    assert num_struck(LOADS, tmp_path) > 5 / EVERY


FULL = (
    BEGIN
    + """
folder = folder / "checkpoints"
assert save(1, 1) == []
names = sorted(path.name for path in folder.iterdir())
failed = 0
for pages in range(0, 40, int(sys.argv[2])):
    filler = folder.parent / "filler"
    filler.write_bytes(b"")
    free = os.statvfs(folder).f_bavail - pages
    with open(filler, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, free * 4096)
    errors = save(2, 2)
    if not errors:
        break
    failed += 1
    assert len(errors) == 2, errors
    assert all("No space left on device" in text and "older" in text for text in errors), errors
    assert sorted(path.name for path in folder.iterdir()) == names
    check((1,))
    filler.unlink()
print(failed)
"""
)


@pytest.mark.slow
@needs_small_disk
def test_a_disk_that_is_full_at_any_page(tmp_path: Path) -> None:
    """Nothing half-written stays, the older checkpoint is untouched, and both ranks say why."""
    disk = tmp_path / "disk"
    disk.mkdir()
    script = tmp_path / "script.py"
    script.write_text(FULL)
    paths = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    command = [*small_disk(disk, "256k"), sys.executable, str(script), str(disk), str(EVERY)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": paths})
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 5 / EVERY
