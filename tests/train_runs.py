"""Small runs of `penstock train` in processes of their own: watched, killed, interrupted, and their losses read."""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.runtime.launch import launch
from processes import forkserver
from waiting import wait_until

SMALL = (
    "--preset nano --depth 6 --width 16 --heads 2 --context 16 --batch 8 --microbatches 4 "
    "--evaluate-every 0 --sample 8"
)
START = 200.0
"""Seconds that torch may take to start four times on a busy machine."""
ENDLESS = "--steps 100000 --set lr_decay=constant --set lr_warmup=0"
"""Of a run that is stopped on its way: it does not end before, however late its test gets to that. Its losses do not
depend on how many steps it would have made."""

COMMAND = [sys.executable, "-c", "import sys; from penstock.cli import main; sys.exit(main())"]


@dataclass(frozen=True)
class Ended:
    """How a run ended: its exit code and what it printed."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        assert self.out.count("\n") == 1, self.out
        value: dict[str, Any] = json.loads(self.out)
        return value


class Forked:
    """`penstock VERB`, forked from a process that has loaded it, which takes three seconds; as `Popen` has it.

    `start_method`: of its ranks. With "fork" they are forked from this process, and need not load torch once more.
    `loads`: modules that are loaded before the ranks are forked, so that not each rank loads them. `ignored`: signals
    that the process is started to ignore.
    """

    def __init__(
        self,
        words: list[str],
        environment: dict[str, str],
        cwd: Path | None = None,
        start_method: str = "fork",
        loads: Sequence[str] = (),
        ignored: Sequence[int] = (),
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="penstock-test-")
        args = (self._folder.name, words, environment, cwd, start_method, loads, ignored)
        self._process = forkserver().Process(target=_penstock, args=args)
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutError(f"the run has not ended after {timeout} s")
        return Path(self._folder.name, "out").read_text(), Path(self._folder.name, "err").read_text()


def _penstock(
    folder: str,
    words: list[str],
    environment: dict[str, str],
    cwd: Path | None,
    start_method: str,
    loads: Sequence[str],
    ignored: Sequence[int],
) -> None:
    """The process of a verb; what it and its ranks say goes to files."""
    from penstock.cli import main
    from penstock.train import command, start
    from penstock.tune import job

    for name, number in (("out", 1), ("err", 2)):
        with Path(folder, name).open("w") as file:
            os.dup2(file.fileno(), number)
    if cwd is not None:
        os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["penstock", *words]
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    for name in loads:
        importlib.import_module(name)
    if start_method == "fork":
        job.launch = start.launch = functools.partial(launch, start_method="fork")
        command.start_rank_server = lambda modules, environment: None
    sys.exit(main())


def penstock(
    words: Sequence[str],
    cwd: Path | None = None,
    loads: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Ended:
    """`penstock WORDS` to its end, in a process forked from one that has loaded it, as are its ranks from that.

    `loads`: modules that are loaded before the ranks are forked. `environment`: variables beside its own.
    """
    process = Forked(list(words), {**_environment(), **(environment or {})}, cwd, loads=loads)
    out, err = process.communicate(START)
    assert process.returncode is not None
    return Ended(process.returncode, out, err)


def _environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "FORCE_COLOR")}
    return {**kept, "OMP_NUM_THREADS": "1"}


class Run:
    """A run in processes of its own. As a context manager it leaves no process behind, whatever the test does.

    `command` starts it in place of `penstock train`, which is forked, as is another `verb`; `cwd` is the folder it is
    started in; `ignored` are signals that the forked process is started to ignore.
    """

    def __init__(
        self,
        folder: Path,
        options: str,
        command: list[str] | None = None,
        cwd: Path | None = None,
        verb: str = "train",
        ignored: Sequence[int] = (),
    ) -> None:
        self.folder = folder
        environment = _environment()
        self._process = (
            Forked([verb, *options.split()], environment, cwd, ignored=ignored)
            if command is None
            else subprocess.Popen(
                [*command, *options.split()],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=cwd,
                env=environment,
            )
        )
        self._begun_as = _inode(folder / "metrics.jsonl")
        self.pids: set[int] = set()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        # The number of a process that has ended may be another's by now.
        running = [self._process.pid, *self.ranks().values()] if self._process.poll() is None else []
        for pid in [*running, *filter(_is_rank, self.pids)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.communicate()

    def ranks(self) -> dict[int, int]:
        """Rank -> process, of those that run now."""
        found = {}
        children = _children(self._process.pid)
        for pid in [*children, *(each for server in children for each in _children(server))]:
            kind, _, number = _called(pid).partition(" ")
            if kind == "rank":
                found[int(number)] = pid
        self.pids |= set(found.values())
        return found

    def steps(self) -> int:
        """Steps done, once a resumed run has dropped from its metrics what it does again."""
        begun = _inode(self.folder / "metrics.jsonl") != self._begun_as
        return len(metrics(self.folder)) if begun else -1

    def wait_for(self, what: Callable[[], bool], seconds: float = START) -> None:
        def there() -> bool:
            ended = self._process.poll() is not None  # asked first: what a run left before its end counts
            found = what()
            assert found or not ended, self._process.communicate()
            return found

        wait_until(there, lambda: f"{self.steps()} steps, ranks {self.ranks()}", seconds, pause=0.001)

    def kill(self, rank: int) -> None:
        """Kills a rank, which the kernel's list of children may leave out while another one comes or goes."""
        found: dict[int, int] = {}

        def there() -> bool:
            found.update(self.ranks())
            return rank in found

        self.wait_for(there)
        os.kill(found[rank], signal.SIGKILL)

    def signal(self, number: int) -> None:
        self.ranks()
        if self._process.poll() is None:
            self._process.send_signal(number)

    def over(self, within: float) -> bool:
        """Whether it ends within so many seconds."""
        end = time.monotonic() + within
        while self._process.poll() is None and time.monotonic() < end:
            time.sleep(0.01)
        return self._process.poll() is not None

    def end(self, within: float = START) -> Ended:
        """Waits for the end; no rank may be left then."""
        out, err = self._process.communicate(timeout=within)
        left = [pid for pid in self.pids if _is_rank(pid)]
        assert not left, f"processes {left} are left"
        return Ended(self._process.returncode, out, err)


def error_in(err: str) -> str:
    """The error that `penstock train` printed, without the line that says that it starts."""
    return re.sub(r"\Astarting .* \.\.\.\n", "", err)


def losses(folder: Path) -> list[float]:
    """The losses in a run's metrics, one a step without a gap. There must be some: two empty lists would be equal."""
    lines = metrics(folder)
    assert lines, f"{folder} has no losses of a run"
    assert [line["step"] for line in lines] == list(range(len(lines)))
    return [line["loss"] for line in lines]


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The whole lines of metrics.jsonl; none where a run is still to begin."""
    path = folder / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def checkpoints(folder: Path) -> list[str]:
    """All that lies in a run's folder of checkpoints."""
    path = folder / "checkpoints"
    return sorted(p.name for p in path.iterdir()) if path.exists() else []


def _called(pid: int) -> str:
    """What the kernel calls a process; nothing where there is none any more."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text()
    return ""


def _is_rank(pid: int) -> bool:
    return _called(pid).startswith("rank ")


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


def _inode(path: Path) -> int | None:
    return path.stat().st_ino if path.exists() else None
