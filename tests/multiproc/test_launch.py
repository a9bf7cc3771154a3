"""Ranks that fail in every way: all end soon, one message says why, and nothing is left behind."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from penstock.rank_environment import SIGNALS
from penstock.runtime.launch import launch
from processes import forkserver
from tiers import chosen
from waiting import PATIENCE, wait_until

pytestmark = [pytest.mark.multiproc]

NUM_RANKS = 3
TESTS = str(Path(__file__).parents[1])

HEAD = """
import os, signal, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from penstock.runtime.errors import DeadlineExceeded
from penstock.runtime.launch import init_process
from waiting import wait_until, write_at_once

rank, num_ranks = init_process(timeout=200.0)
folder = Path(sys.argv[1])
write_at_once(folder / f"pid-{rank}", str(os.getpid()))


def pass_on(value):
    tensor = torch.tensor([float(value)])
    sending = dist.isend(tensor, (rank + 1) % num_ranks)
    received = torch.zeros(1)
    dist.irecv(received, (rank - 1) % num_ranks).wait()
    sending.wait()
    return int(received)


def wait_for(peer):
    dist.irecv(torch.zeros(1), peer).wait()


assert pass_on(rank) == (rank - 1) % num_ranks
(folder / f"ready-{rank}").touch()
"""


AT_ONCE = """
import os, sys, time
from pathlib import Path
from waiting import write_at_once

folder, rank = Path(sys.argv[1]), os.environ["RANK"]
write_at_once(folder / f"pid-{rank}", str(os.getpid()))
"""
"""In place of the head, for ranks that never join."""


def launch_there(folder: Path, num_ranks: int, start_method: str, grace: float, environment: dict[str, str]) -> None:
    """The parent of the ranks, in a session of its own; what it says goes to files.

    With the `start_method` "fork" ranks are forked from this process, which has loaded torch. With "forkserver" an
    interpreter is started for that, which loads torch for seconds.
    """
    os.setsid()
    for number in SIGNALS:  # as in the foreground, whatever the server was started to ignore from which this comes
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    os.environ |= environment
    for name, number in (("out", 1), ("err", 2)):
        with (folder / name).open("w") as file:
            os.dup2(file.fileno(), number)
    words = [str(folder / "ranks.py"), str(folder)]
    code = launch(words, num_ranks, start_method=start_method, grace=grace)
    left = alive(pids_of(folder))
    sys.exit(f"ranks {left} outlived the launch" if left else code)


@dataclass
class Run:
    """A launch under way, and the folder in which its ranks leave their numbers."""

    folder: Path
    num_ranks: int
    ended: Callable[[], bool]
    outcome: Callable[[], tuple[int, str, str]]

    def ready(self) -> None:
        """Returns when all ranks have talked to each other."""
        self.appear("ready-*")

    def appear(self, pattern: str, number: int | None = None) -> None:
        """Returns when there are as many such files, one per rank unless it is said."""

        def there() -> bool:
            ended = self.ended()  # asked first: what a launch left before its end counts
            enough = len(list(self.folder.glob(pattern))) >= (number or self.num_ranks)
            assert enough or not ended, self.outcome()
            return enough

        wait_until(
            there, lambda: f"of {pattern} there are only {sorted(each.name for each in self.folder.iterdir())}"
        )

    def pids(self) -> list[int]:
        return pids_of(self.folder)

    def finish(self) -> tuple[int, str, str]:
        """Exit code, stdout and stderr, which names ranks that outlived it; an error if it has not ended in time."""
        wait_until(self.ended, lambda: f"the launch has not ended: {self.outcome()}, ranks {alive(self.pids())} run")
        return self.outcome()


def pids_of(folder: Path) -> list[int]:
    return [int(path.read_text()) for path in sorted(folder.glob("pid-*"))]


def alive(pids: list[int]) -> list[int]:
    """Those of our own ranks that still run; a number that went to another program by now does not count."""
    running = []
    for pid in pids:
        with contextlib.suppress(OSError):
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            if state != "Z" and Path(f"/proc/{pid}/comm").read_text().startswith("rank "):
                running.append(pid)
    return running


@pytest.fixture
def start_parent(tmp_path: Path) -> Iterator[Callable[..., tuple[Run, int]]]:
    """Launches from a process that can be sent signals, and gives its number."""
    processes: list[Any] = []

    def start(
        body: str,
        head: str = HEAD,
        num_ranks: int = NUM_RANKS,
        start_method: str = "fork",
        grace: float = 3.0,
    ) -> tuple[Run, int]:
        (tmp_path / "ranks.py").write_text(f"import sys\nsys.path.append({TESTS!r})\n{head}{body}")
        words = (tmp_path, num_ranks, start_method, grace, dict(os.environ))
        process = forkserver().Process(target=launch_there, args=words)
        processes.append(process)
        process.start()

        def outcome() -> tuple[int, str, str]:
            said = [path.read_text() if path.exists() else "" for path in (tmp_path / "out", tmp_path / "err")]
            return process.exitcode, said[0], said[1]

        return Run(tmp_path, num_ranks, lambda: not process.is_alive(), outcome), process.pid

    yield start
    for process in processes:
        process.kill()
        process.join()


@pytest.fixture
def start(start_parent: Callable[..., tuple[Run, int]]) -> Callable[..., Run]:
    return lambda *args, **options: start_parent(*args, **options)[0]


def once(err: str, words: str) -> None:
    assert err.count(words) == 1, err
    assert err.count("penstock:") == 1, err
    assert len(err.splitlines()) < 25, err


@pytest.mark.slow
def test_all_well(start, tmp_path: Path) -> None:
    """Stdout and stderr are the parent's, and the process that loaded torch is the same for all."""
    body = (
        "told = [rank, torch.get_num_threads(), os.getsid(0) == os.getpid()]\n"
        "print('rank', *told, flush=True)\n"
        "(folder / f'loaded-by-{os.getppid()}').touch()\n"
        "if rank == 1: print('now', file=sys.stderr); os.write(2, b'raw\\n')\n"
    )
    code, out, err = start(body, start_method="forkserver").finish()
    threads = os.environ.get("OMP_NUM_THREADS", max(1, len(os.sched_getaffinity(0)) // NUM_RANKS))
    expected = [f"rank {rank} {threads} True" for rank in range(NUM_RANKS)]
    assert (code, sorted(out.splitlines()), err) == (0, expected, "now\nraw\n")
    assert len(list(tmp_path.glob("loaded-by-*"))) == 1


def test_exit_handlers_run_after_threads_have_ended(start) -> None:
    """A process of multiprocessing ends without them."""
    body = (
        "import atexit, threading\n"
        "atexit.register(print, 'left', flush=True)\n"
        "threading.Timer(0.2, print, ['thread'], {'flush': True}).start()\n"
    )
    assert start(body, AT_ONCE, num_ranks=1).finish() == (0, "thread\nleft\n", "")


def test_an_exception(start) -> None:
    run = start(
        "if rank == 2:\n"
        "    def forward(): raise ValueError('the input is too wide')\n"
        "    forward()\n"
        "wait_for((rank + 1) % num_ranks)\n",
        grace=PATIENCE / 2,  # in which they notice by themselves
    )
    run.ready()
    code, out, err = run.finish()
    once(err, "rank 2 failed: ValueError: the input is too wide")
    assert err.count("Traceback (most recent call last)") == 1
    assert "in forward" in err
    assert (code, out) == (1, "")


@pytest.mark.parametrize("victim", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_killed_rank(start, victim: int) -> None:
    run = start("wait_for((rank + 1) % num_ranks)")
    run.ready()
    os.kill(run.pids()[victim], signal.SIGKILL)
    code, _, err = run.finish()
    once(err, f"rank {victim} was killed by SIGKILL; out of memory is the usual cause")
    assert code == 137


@pytest.mark.slow
def test_a_rank_that_just_exits(start) -> None:
    run = start("if rank == 1: os._exit(3)\nwait_for((rank + 1) % num_ranks)")
    code, _, err = run.finish()
    once(err, "rank 1 ended with exit code 3 and reported no exception")
    assert code == 3


@pytest.mark.slow
def test_ranks_that_do_not_notice_are_stopped(start) -> None:
    """One sleeps, one ignores SIGTERM, one is stopped and has a child of its own. Only then another one fails."""
    run = start(
        "deaf, of_child = folder / 'deaf', folder / 'pid-child'\n"
        "if rank == 0:\n"
        "    wait_until(lambda: deaf.exists() and of_child.exists(), lambda: os.listdir(folder))\n"
        "    stopped = Path('/proc', (folder / 'pid-3').read_text(), 'stat')\n"
        "    wait_until(lambda: ') T ' in stopped.read_text(), stopped.read_text)\n"
        "    raise RuntimeError('enough')\n"
        "if rank == 1: time.sleep(1000)\n"
        "if rank == 2:\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    deaf.touch()\n"
        "    time.sleep(1000)\n"
        "child = os.fork()\n"
        "if child: write_at_once(of_child, str(child)); os.kill(os.getpid(), signal.SIGSTOP)\n"
        "time.sleep(1000)\n",
        num_ranks=4,
        grace=1.0,
    )
    run.ready()
    code, _, err = run.finish()
    once(err, "rank 0 failed: RuntimeError: enough")
    assert (code, len(run.pids())) == (1, 5)


@pytest.mark.slow
def test_a_hanging_peer_is_named_by_the_deadline(start) -> None:
    run = start(
        "if rank == 1: time.sleep(1000)\n"
        "raise DeadlineExceeded('rank 0 waited 60 s for F3 of stage 1 from rank 1')\n",
        num_ranks=2,
        grace=0.5,
    )
    code, _, err = run.finish()
    once(err, "rank 0 failed: DeadlineExceeded: rank 0 waited 60 s for F3 of stage 1 from rank 1")
    assert code == 1


def test_a_killed_parent_takes_its_ranks_along(start_parent) -> None:
    run, parent = start_parent("time.sleep(1000)")
    run.ready()
    pids = run.pids()
    assert len(alive(pids)) == NUM_RANKS
    os.kill(parent, signal.SIGKILL)
    wait_until(lambda: not alive(pids), lambda: f"ranks {alive(pids)} of {pids} still run")


@pytest.mark.slow
def test_a_killed_parent_takes_ranks_along_that_have_not_joined(start_parent) -> None:
    run, parent = start_parent("time.sleep(1000)", AT_ONCE, start_method="forkserver")
    run.appear("pid-*")
    os.kill(parent, signal.SIGKILL)
    wait_until(lambda: not alive(run.pids()), lambda: f"ranks {alive(run.pids())} still run")


@pytest.mark.slow
def test_the_process_that_ranks_are_forked_from_is_killed(start) -> None:
    """The launch returned at once, while its ranks were still ending."""
    run = start(
        "(folder / f'by-{os.getppid()}').touch()\nwait_for((rank + 1) % num_ranks)", start_method="forkserver"
    )
    run.ready()
    (server,) = run.folder.glob("by-*")
    os.kill(int(server.name[3:]), signal.SIGKILL)
    code, _, err = run.finish()
    once(err, "ended with exit code 255")
    assert code == 255


PROGRAMS = chosen(
    {
    "all well": "",
    "one raises": "if rank == '1': raise ValueError('a word too many')",
    "one leaves": "if rank == '1': sys.exit(7)",
    "one says why it leaves": "if rank == '1': sys.exit('that is why')",
    "one is killed": "if rank == '0': os.kill(os.getpid(), signal.SIGKILL)",
    "one is interrupted": "if rank == '0': raise KeyboardInterrupt",
    "a thread outlives the program": "threading.Timer(0.3, lambda: print('late', flush=True)).start()",
    "one can't be imported": "if rank == '1': import a_module_that_is_not_there",
    },
    by_day=["one raises", "one leaves", "one is killed", "a thread outlives the program"],
)  # fmt: skip


def launch_each(folder: Path) -> None:
    """Launches all programs by both start methods; what each launch said goes to a file."""
    ends: dict[str, list[Any]] = {}
    for what, body in PROGRAMS.items():
        (folder / "program.py").write_text(f"import os, signal, sys, threading\nrank = os.environ['RANK']\n{body}\n")
        for method in ("fork", "forkserver"):
            said = io.StringIO()
            with contextlib.redirect_stderr(said):
                code = launch([str(folder / "program.py")], 2, start_method=method, grace=PATIENCE / 2)
            ends.setdefault(what, []).append([code, said.getvalue()])
    (folder / "ends").write_text(json.dumps(ends))


@pytest.mark.slow
def test_ranks_end_alike_by_each_start_method(tmp_path: Path) -> None:
    process = forkserver().Process(target=launch_each, args=(tmp_path,))
    process.start()
    process.join()
    for what, (forked, served) in json.loads((tmp_path / "ends").read_text()).items():
        assert forked == served, what
        assert (forked[0] == 0) == (what in ("all well", "a thread outlives the program"))


@pytest.mark.usefixtures("interruptible")
@pytest.mark.slow
def test_ctrl_c_is_passed_on_and_ranks_may_leave_cleanly(start_parent) -> None:
    run, parent = start_parent(
        "try:\n"
        "    (folder / f'in-try-{rank}').touch()\n"
        "    while True: time.sleep(0.05)\n"
        "except KeyboardInterrupt:\n"
        "    time.sleep(0.5)\n"
        "    print('saved', pass_on(rank) == (rank - 1) % num_ranks, flush=True)\n"
    )
    run.appear("in-try-*")
    os.kill(parent, signal.SIGINT)
    code, out, err = run.finish()
    assert (code, out.splitlines(), err) == (0, ["saved True"] * NUM_RANKS, "")


@pytest.mark.slow
@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_that_ranks_die_of(start_parent) -> None:
    run, parent = start_parent("time.sleep(1000)")
    run.ready()
    os.kill(parent, signal.SIGINT)
    code, _, err = run.finish()
    assert (code, err) == (130, "penstock: stopped by SIGINT\n")


@pytest.mark.slow
@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_inside_native_code_that_may_not_throw(start_parent) -> None:
    """Native code that meets a KeyboardInterrupt where it may not throw calls std::terminate, which is SIGABRT."""
    run, parent = start_parent(
        "signal.signal(signal.SIGINT, lambda *_: os.abort())\n(folder / f'native-{rank}').touch()\ntime.sleep(1000)"
    )
    run.ready()
    run.appear("native-*")
    os.kill(parent, signal.SIGINT)
    code, _, err = run.finish()
    assert (code, err) == (130, "penstock: stopped by SIGINT\n")


@pytest.mark.slow
@pytest.mark.usefixtures("interruptible")
def test_a_second_ctrl_c_does_not_wait(start_parent) -> None:
    run, parent = start_parent(
        "signal.signal(signal.SIGINT, lambda *_: (folder / f'told-{rank}').touch())\n"
        "(folder / f'deaf-{rank}').touch()\ntime.sleep(1000)"
    )
    run.ready()
    run.appear("deaf-*")
    os.kill(parent, signal.SIGINT)
    run.appear("told-*")
    os.kill(parent, signal.SIGINT)
    code, _, err = run.finish()
    assert (code, err) == (130, "penstock: stopped by SIGINT\n")


@pytest.mark.slow
def test_sigterm_to_the_parent_ends_all(start_parent) -> None:
    run, parent = start_parent("time.sleep(1000)")
    run.ready()
    os.kill(parent, signal.SIGTERM)
    code, _, err = run.finish()
    assert (code, err) == (143, "penstock: stopped by SIGTERM\n")


def test_hosts_of_which_some_have_a_gpu_for_each_rank_waited_for_each_other(start) -> None:
    head = """
import os
import torch
from penstock.runtime.launch import init_process

torch.cuda.is_available, torch.cuda.set_device = lambda: True, lambda device: None
torch.cuda.device_count = lambda: 1 if os.environ["RANK"] == "2" else 8
init_process(timeout=200.0)
"""
    code, _, err = start("", head).finish()
    assert code == 1
    once(err, "rank 0 would go by cpu:gloo,cuda:nccl and rank 2 by gloo, which can't be mixed")
    assert "--nproc-per-node" in err


@pytest.mark.slow
def test_what_fails_before_it_can_report_is_told_once(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("import no_such_module_at_all")
    forkserver()  # from which they are forked
    assert launch([str(script)], 3) == 1
    err = capfd.readouterr().err
    assert err.count("ModuleNotFoundError: No module named 'no_such_module_at_all'") == 1
    script.write_text("import sys; print('by the way', file=sys.stderr)")
    assert launch([str(script)], 2) == 0
    assert capfd.readouterr().err == "by the way\n" * 2
