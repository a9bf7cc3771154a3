"""Ranks of a fork server that was forked ahead end as those of one that was started for them."""

from __future__ import annotations

import io
import os
import signal
import sys
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest

from listening import runs
from penstock.runtime.launch import RankServer, launch
from processes import forkserver
from train_runs import SMALL, Run
from waiting import PATIENCE, wait_until, write_at_once

pytestmark = [pytest.mark.multiproc]

HEAD = """
import os, signal, sys, threading
rank = os.environ["RANK"]
line = f"{rank} {os.getcwd() == sys.path[0]} {os.environ['SAID']} {sys.stdin.read()}\\n"
os.write(1, line.encode())  # at once, since two ranks write to one file
"""

PROGRAMS = {
    "all well": "",
    "one raises": "if rank == '1': raise ValueError('a word too many')",
    "one leaves": "if rank == '1': sys.exit(7)",
    "one says why it leaves": "if rank == '1': sys.exit('that is why')",
    "one is killed": "if rank == '0': os.kill(os.getpid(), signal.SIGKILL)",
    "one is interrupted": "if rank == '0': raise KeyboardInterrupt",
    "a thread outlives the program": "threading.Timer(0.3, lambda: print('late', flush=True)).start()",
    "one can't be imported": "if rank == '1': import a_module_that_is_not_there",
}


def _launched(program: str, out: str, ahead: bool) -> None:
    """A program that launches another; its exit code is the launch's, and what was said goes to files."""
    stdout = os.open(f"{out}.out", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(stdout, 1)
    waiting = RankServer.fork([]) if ahead else None
    os.environ["SAID"] = "after the fork"
    os.chdir(os.path.dirname(program))
    said = io.StringIO()
    with redirect_stderr(said):
        # A rank that ends by itself has time for it, however late it starts.
        code = launch([program], 2, preload=[], waiting=waiting, grace=PATIENCE / 2)
    Path(f"{out}.err").write_text(said.getvalue())
    sys.exit(code)


def _end_of(process: Any) -> None:
    """Starts a process and returns when it has ended."""
    process.start()
    try:
        wait_until(lambda: not process.is_alive(), lambda: f"process {process.pid} still runs")
    finally:
        process.kill()
        process.join()


def _end(program: Path, ahead: bool) -> tuple[int | None, list[str], list[str]]:
    out = str(program.with_name(f"ahead-{ahead}"))
    process = forkserver().Process(target=_launched, args=(str(program), out, ahead))
    _end_of(process)
    said = [line for line in Path(f"{out}.err").read_text().splitlines() if not line.startswith("  ")]  # no frames
    return process.exitcode, sorted(Path(f"{out}.out").read_text().splitlines()), said


@pytest.mark.parametrize("what", PROGRAMS)
def test_ranks_end_as_those_of_a_server_of_their_own(what: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(HEAD + PROGRAMS[what] + "\n")
    code, out, said = _end(program, ahead=True)
    assert (code, out, said) == _end(program, ahead=False)
    assert "0 True after the fork " in out
    assert (code == 0) == (what in ("all well", "a thread outlives the program"))


def _kills_its_server(out: str) -> None:
    waiting = RankServer.fork([])
    waiting.kill()
    said = io.StringIO()
    with redirect_stderr(said):
        code = launch(["-m", "this"], 2, preload=[], waiting=waiting)
    Path(out).write_text(f"{code} {said.getvalue()}")


def test_a_server_that_is_killed_as_it_waits_is_spoken_of(tmp_path: Path) -> None:
    _end_of(forkserver().Process(target=_kills_its_server, args=(str(tmp_path / "said"),)))
    assert (tmp_path / "said").read_text() == (
        "1 penstock: the process that ranks are forked from was killed by SIGKILL\n"
    )


def _waits(out: str, then: str) -> None:
    """Forks a server and discards it, or is killed."""
    waiting = RankServer.fork([])
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    write_at_once(Path(out), children)
    if then == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    waiting.discard()
    assert not Path(f"/proc/{int(children)}").exists()


@pytest.mark.parametrize("then", ["discarded", "killed"])
def test_a_server_that_nobody_needs_any_more_ends(then: str, tmp_path: Path) -> None:
    process = forkserver().Process(target=_waits, args=(str(tmp_path / "pid"), then))
    _end_of(process)
    assert process.exitcode == (0 if then == "discarded" else -signal.SIGKILL)
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: not runs(pid), lambda: f"the server, process {pid}, still runs")


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


@pytest.mark.slow
def test_penstock_train_forks_its_ranks_itself_but_where_ones_own_code_ran(tmp_path: Path) -> None:
    model = tmp_path / "net.py"
    model.write_text(
        "import torch\nfrom torch import nn\n"
        "class Net(nn.Sequential):\n"
        "    def __init__(self):\n        super().__init__(nn.Linear(2, 2), nn.Linear(2, 2))\n"
        "loss_fn = nn.MSELoss()\ndef data():\n    return [(torch.ones(4, 2), torch.ones(4, 2))]\n"
    )
    for options, itself in (
        (f"{SMALL} --ranks 2 --steps 100000", True),
        (f"--ranks 2 --steps 100000 --microbatches 2 --model {model}:Net --data {model}:data", False),
    ):
        with Run(tmp_path / str(itself), f"{options} --out {tmp_path / str(itself)}") as run:
            run.wait_for(lambda run=run: len(run.ranks()) == 2)  # type: ignore[misc]
            (server,) = {int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in run.pids}
            assert ("launch.server" not in _command(server)) == itself
