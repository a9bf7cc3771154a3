"""Processes that their host gives little: closed streams, a folder that is gone, few open files, little memory."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli.failure import failure_of
from penstock.host_process import limit_behind
from penstock.runtime.launch.rank import FailureReport
from tiers import others_nightly
from train_runs import COMMAND, SMALL

pytestmark = pytest.mark.unit

PENSTOCK = '"$@"'
"""The program's command, as words of the shell."""


def shell(line: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = ["bash", "-c", line, "bash", *COMMAND]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=250)


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize("closed", others_nightly([">&-", "2>&-", "<&- >&- 2>&-"], ["<&- >&- 2>&-"]))
def test_ranks_of_a_run_whose_streams_are_closed_failed_or_wrote_into_files(closed: str, tmp_path: Path) -> None:
    """Ranks had no `sys.stdout` to flush. Without a stderr the run ended with code 1 and could not say why: what it
    opened next had the number of stderr.
    """
    done = shell(f"{PENSTOCK} train --pp 2 {SMALL} --steps 1 --out run {closed}", tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "report.json").exists()


def test_closed_streams_are_open_in_processes_that_are_started() -> None:
    started = "import os; [os.fstat(number) for number in (0, 1, 2)]; print(1)"
    program = (
        "import subprocess, sys; from penstock.host_process import open_standard_streams; open_standard_streams();"
        "print('out'); print('err', file=sys.stderr); assert sys.stdin.read() == '';"
        f"sys.exit(subprocess.run([sys.executable, '-c', {started!r}]).returncode)"
    )
    for closed in ("<&- >&- 2>&-", "<&- 2>&-", ">&-", "2>&-", "</dev/null"):
        line = f'"{sys.executable}" -c "$0" {closed}'
        done = subprocess.run(["bash", "-c", line, program], capture_output=True, text=True)
        assert done.returncode == 0, (closed, done.stderr)
        assert "Error" not in done.stderr


def test_a_folder_that_was_removed_ended_the_process_with_a_message_about_a_library(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    done = shell(f"rmdir ../gone; {PENSTOCK} train --out {tmp_path / 'run'}; echo $?; {PENSTOCK} --version", gone)
    assert done.stderr.startswith("penstock: the current folder can't be read (No such file or directory)"), done
    assert done.stderr.endswith("change to a folder that is there (cd)\n")
    assert done.stdout.startswith("2\npenstock ")


def test_the_limit_behind_an_error_is_named_with_what_to_do() -> None:
    """Of open files, torch said "Failed to init uv loop", and a lack of memory was called a bug of ours."""
    files = OSError(errno.EMFILE, "Too many open files", "/usr/lib/module.py")
    number = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    said = f"a process may have {number} files and connections open here (ulimit -n); raise that"
    assert said in FailureReport.of(files, 3).text
    failure = failure_of(files)
    assert failure is not None
    assert failure.exit_code == 1
    assert said in failure.message
    assert said in str(limit_behind(RuntimeError("Failed to init uv loop"))), "a rank's store, with 20 files"
    hidden = RuntimeError("a module could not be loaded")
    hidden.__cause__ = ImportError("libtorch_cpu.so: failed to map segment from shared object")
    memory = failure_of(hidden)
    assert memory is not None
    assert memory.message.startswith("a module could not be loaded; memory ran out")
    assert failure_of(MemoryError()) is not None
    assert limit_behind(ValueError("no files")) is None
    assert failure_of(ValueError("no files")) is None


@pytest.mark.slow
@pytest.mark.multiproc
def test_a_run_with_too_few_files_says_how_many_it_may_open(tmp_path: Path) -> None:
    done = shell(f"ulimit -n 18; {PENSTOCK} train --pp 2 {SMALL} --steps 1 --out run", tmp_path)
    assert done.returncode != 0
    assert "a process may have 18 files and connections open here (ulimit -n); raise that" in done.stderr, done.stderr


def test_planning_in_too_little_memory_was_a_bug_in_penstock(tmp_path: Path) -> None:
    line = f"ulimit -v 200000; {PENSTOCK} plan --ranks 128 --microbatches 1024"
    done = shell(line, tmp_path)
    assert done.returncode == 1, done
    assert "memory ran out: a process may have 195 MiB here (ulimit -v); raise that" in done.stderr, done.stderr
