"""The one way in which a run starts, and how it stops.

`run_job` runs a job in one of three ways. Its first rank prints the report.

    in this process     all ranks take turns, with `--in-process`
    as one rank         a launcher such as torchrun has started this process and the others
    in new processes    one process a rank, which read the job from a folder: `python -m penstock.train --job FOLDER`

A job is pickled for the processes that run it. Its large arrays lie beside it as files that each process maps. So a
corpus is read once and is in memory once.

On Ctrl-C or SIGTERM the signal only sets a flag. The loop ends after its step and saves.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Protocol

import numpy as np
import torch
import torch.distributed as dist

from penstock.rank_environment import RankEnvironment
from penstock.runtime import RuntimeFailure
from penstock.runtime.adapt.store import RedisStore
from penstock.runtime.launch import init_process, launch
from penstock.runtime.launch.launcher import handled
from penstock.train.checks import SettingsError
from penstock.train.folder import RunFolder

INTERRUPTED = 130
PATIENCE = 30.0
"""Seconds that SIGTERM leaves for a step and a checkpoint. A scheduler that sends it often kills after that time."""


class RunFailed(Exception):
    """Ranks that ended without a report; the message names the one that failed first."""

    rule = "run"

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class LaunchedJob(Protocol):
    """A run that was checked and may start. It can be pickled.

    Attributes:
        folder: the run's folder.
        as_json: print the report as JSON and nothing else.
        in_process: run all ranks in one process.
        num_processes: processes of the run if it is not in one.
        timeout: the longest time that any wait may last (seconds).
        environment: variables of the processes that are started.
    """

    @property
    def folder(self) -> str: ...
    @property
    def as_json(self) -> bool: ...
    @property
    def in_process(self) -> bool: ...
    @property
    def num_processes(self) -> int: ...
    @property
    def timeout(self) -> float: ...
    @property
    def environment(self) -> Mapping[str, str]: ...

    def require_folder(self, folder: RunFolder) -> None:
        """Raises SettingsError if the run must not write into its folder."""
        ...

    def announcement(self) -> str:
        """The lines that are printed before the run."""
        ...

    def run(self, is_first: bool) -> int:
        """Runs the ranks of this process, and returns the exit code. The first process prints the report."""
        ...

    def way_on(self, said: str) -> str:
        """A line on how to continue after the run failed with the message `said`; empty if there is no way."""
        ...


def run_job(job: LaunchedJob) -> int:
    """Runs a job to its end, and returns the exit code.

    Raises:
        SettingsError: the folder is used by another run.
        RunFailed: a rank failed.
        The errors of the run itself, if this process is a rank.
    """
    if RankEnvironment.of(os.environ) is not None and not job.in_process:
        rank = _joined(job)
        _announce(job, is_first=rank == 0)
        return job.run(is_first=rank == 0)
    folder = RunFolder(Path(job.folder))
    with folder.made():
        job.require_folder(folder)  # another run may have begun there since the first check, and ended
        _announce(job, is_first=True)
        return job.run(is_first=True) if job.in_process else _run_in_processes(job, folder)


def _announce(job: LaunchedJob, is_first: bool) -> None:
    if is_first and not job.as_json:
        print(job.announcement(), file=sys.stderr, flush=True)


def _joined(job: LaunchedJob) -> int:
    """Joins this process to the others of the run, and returns its number."""
    warm_up_malloc()
    return init_process(job.timeout)[0]


MALLOC_WARMUP_BYTES = 28 << 20
"""Bytes; glibc's limit grows up to 32 MiB."""


def warm_up_malloc() -> None:
    """Keeps the memory that a step frees in the process, since the next step needs it again.

    glibc keeps freed memory once a program has freed one large tensor.
    Otherwise each step returns its activations to the system and faults them in again, page by page. On one core of
    an AMD EPYC that was 800 to 1800 faults per step of a small GPT, or 3% of its time.
    """
    torch.empty(MALLOC_WARMUP_BYTES, dtype=torch.uint8)  # freed at once


def _run_in_processes(job: LaunchedJob, folder: RunFolder) -> int:
    folder.report.unlink(missing_ok=True)  # the report of an earlier part of the run
    with tempfile.TemporaryDirectory(prefix="penstock-", ignore_cleanup_errors=True) as handover:
        hand_over(Path(handover), job)
        program = ["-m", "penstock.train", "--job", handover]
        code, said = start_ranks(program, job.num_processes, type(job).__module__, job.environment)
    try:
        report = json.loads(folder.report.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunFailed(said + job.way_on(said), code or 1) from None
    if said:
        print(said if code == 0 else f"penstock: {said}", file=sys.stderr, flush=True)
    return code or (INTERRUPTED if report["interrupted"] else 0)


def run_rank(handover: Path) -> NoReturn:
    """Runs the ranks of a process that `run_job` has started, and ends the process."""
    job = take_over(handover)
    rank = _joined(job)
    if rank == 0:
        shutil.rmtree(handover, ignore_errors=True)  # all have read the job, or they would not have joined
    job.run(is_first=rank == 0)
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    # Python's own end takes a while among native threads, and once ended in an abort. All files are written.
    os._exit(0)


LARGE = 1 << 20
"""Bytes from which an array of a job is a file that processes map. A smaller one is in the pickled job."""


class _JobWriter(pickle.Pickler):
    """Pickles a job; its large arrays become files beside it."""

    def __init__(self, folder: Path, file: io.BufferedWriter) -> None:
        super().__init__(file)
        self._folder, self._num_arrays = folder, 0

    def persistent_id(self, value: Any) -> str | None:
        if type(value) is not np.ndarray or value.nbytes < LARGE:
            return None
        name, self._num_arrays = f"{self._num_arrays}.npy", self._num_arrays + 1
        np.save(self._folder / name, value, allow_pickle=False)
        return name


class _JobReader(pickle.Unpickler):
    def __init__(self, folder: Path, file: io.BufferedReader) -> None:
        super().__init__(file)
        self._folder = folder

    def persistent_load(self, name: str) -> Any:
        return np.load(self._folder / name, mmap_mode="r", allow_pickle=False)


def hand_over(folder: Path, job: LaunchedJob) -> None:
    """Writes the files that `take_over` reads. Raises RuntimeFailure if the disk refuses."""
    try:
        with (folder / "job").open("wb") as file:
            _JobWriter(folder, file).dump(job)
    except OSError as error:
        raise RuntimeFailure(
            f"what ranks need could not be written to {folder}: {error.strerror or error}; make room there, or set "
            "TMPDIR to a folder on another disk"
        ) from None


def take_over(folder: Path) -> LaunchedJob:
    """The job. Its folder may be removed once every rank has it: mapped files stay readable."""
    with (folder / "job").open("rb") as file:
        job: LaunchedJob = _JobReader(folder, file).load()
        return job


def check_store(address: str | None) -> None:
    """Raises SettingsError for a store that this host cannot reach, or that refuses it."""
    if address is None:
        return
    try:
        RedisStore(address).close()
    except RuntimeFailure as error:
        raise SettingsError(f"--set store: {error}") from None


def start_ranks(
    program: Sequence[str], num_ranks: int, preload: str, env: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Starts a program as `launch` takes it, one process per rank.

    Args:
        preload: the module with the work of the ranks.

    Returns:
        The exit code, and the message about a failure.
    """
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = launch(program, num_ranks, preload=[preload], env=dict(env or {}), patience=PATIENCE)
    return code, said.getvalue().strip().removeprefix("penstock: ")


SAME = 1.0
"""Seconds in which a second signal counts as the same one, as a terminal and a launcher may both pass it on."""


class StopRequest:
    """Set by SIGINT or SIGTERM inside its `with`. A later second signal ends the process at once by
    KeyboardInterrupt.
    """

    def __init__(self) -> None:
        self._asked_at: float | None = None
        self._number = signal.SIGINT
        self._handled = contextlib.ExitStack()

    @property
    def asked(self) -> bool:
        return self._asked_at is not None

    @property
    def exit_code(self) -> int:
        """The exit code of a process that ends by the signal: 130 for Ctrl-C, 143 for SIGTERM."""
        return 128 + self._number

    def __enter__(self) -> StopRequest:
        self._handled.enter_context(handled(self._note, signal.SIGINT, signal.SIGTERM))
        return self

    def __exit__(self, *error: object) -> None:
        self._handled.close()

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._asked_at is None:
            self._asked_at, self._number = now, signal.Signals(number)
        elif now - self._asked_at > SAME:
            raise KeyboardInterrupt
