"""A lab that exists as long as its block, or until it is removed.

    with Lab(num_hosts=2) as lab:
        lab.link(0, 1, "latency:30ms")
        process = lab.start(0, ["python", "server.py"])
        ...
        lab.interface_down(0, 1)

A separate process, the keeper, carries the hosts' packets. It holds one end of a pipe, and this process the other. So
in whatever way this process ends, the keeper notices it and removes the lab.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import IO, Any

from penstock.lab.control import ask
from penstock.lab.errors import LabError, LabMisuse
from penstock.lab.folder import LabFolder, names
from penstock.lab.layout import Layout
from penstock.lab.links import read_links
from penstock.lab.order import LabOrder
from penstock.lab.permitted import require
from penstock.lab.process import HostProcess
from penstock.lab.removal import remove
from penstock.lab.running import RunningLab

PATIENCE = 30.0
"""Seconds that making or removing a lab may take."""


class Lab(RunningLab):
    """Several hosts on this machine. They are made at once and removed at the end of the block.

    Args:
        num_hosts: 1 to 16.
        num_nics: interfaces per host, each on a network of its own.
        links: conditions from the start, like "0:1=latency:30ms" or "0:1@1=loss:1%".

    Raises:
        LabError: what labs need and this machine lacks, or what went wrong.
        LabMisuse, CostError: invalid hosts or conditions.

    Examples:
        >>> import penstock as ps
        >>> if not ps.lab.missing():
        ...     with ps.lab.Lab(num_hosts=2, links="0:1=latency:30ms") as lab:
        ...         assert lab.layout.num_hosts == 2
    """

    def __init__(self, num_hosts: int = 2, num_nics: int = 2, links: str | Iterable[str] = ()) -> None:
        texts = links.split() if isinstance(links, str) else list(links)
        self._processes: list[HostProcess] = []
        reading, self._lifeline = os.pipe()
        try:
            with os.fdopen(reading):
                self._keeper, name = start_keeper(num_hosts, num_nics, texts, reading)
        except BaseException:
            os.close(self._lifeline)
            raise
        super().__init__(name)

    def __enter__(self) -> Lab:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(
        self,
        host: int,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
        cwd: str | os.PathLike[str] | None = None,
    ) -> HostProcess:
        """Starts a program on a host. It is killed when the lab ends, if it has not ended before."""
        process = super().start(host, command, env, stdout=stdout, stderr=stderr, cwd=cwd)
        self._processes.append(process)
        return process

    def close(self) -> None:
        """Ends what runs on the hosts and removes the lab. Returns when nothing of it is left."""
        if self._keeper.returncode is not None:
            return
        for process in self._processes:
            process.stop()
        os.close(self._lifeline)
        try:
            self._keeper.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()
        if self.name in names():  # the keeper was killed, or could not do all
            remove(self.name)


def make(num_hosts: int, num_nics: int, links: Sequence[str]) -> RunningLab:
    """Makes a lab that exists until `end`. Raises the same as `Lab`."""
    _, name = start_keeper(num_hosts, num_nics, links, None)
    return RunningLab(name)


def end(name: str) -> None:
    """Ends a lab that runs, or removes a leftover. Returns when nothing of it is left. Raises LabError."""
    folder = LabFolder(name)
    if name not in names():
        raise LabError(f"there is no lab {name}; `penstock lab list` shows those that are there")
    if folder.alive():
        keeper = os.pidfd_open(int(name))
        try:
            ask(folder.control, {"do": "end"})
            if not select.select([keeper], [], [], PATIENCE)[0]:
                raise LabError(f"lab {name} did not end within {PATIENCE:g} s; its keeper is process {name}")
        finally:
            os.close(keeper)
    if name in names():
        remove(name)


def start_keeper(
    num_hosts: int, num_nics: int, links: Sequence[str], lifeline: int | None
) -> tuple[subprocess.Popen[bytes], str]:
    """Starts a keeper. Returns it and the name of its lab when the lab exists. Raises the same as `Lab`."""
    read_links(links, Layout("0", num_hosts, num_nics))  # what is wrong is told before anything starts
    require()
    reading, ready = os.pipe()
    owner = None if lifeline is None else os.getpid()
    order = LabOrder(num_hosts, num_nics, tuple(links), owner, lifeline, ready)
    with os.fdopen(reading, "rb") as answer:
        try:
            keeper = subprocess.Popen(
                [sys.executable, "-m", "penstock.lab.keeper", order.to_json()],
                pass_fds=[each for each in (lifeline, ready) if each is not None],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL if lifeline is None else None,
                start_new_session=True,
            )
        finally:
            os.close(ready)
        try:
            said = answer.read()  # its end too: the keeper closes it, or ends
            message: dict[str, Any] = json.loads(said) if said else {}
            if "name" in message:
                return keeper, message["name"]
        except BaseException:
            keeper.terminate()
            raise
    with contextlib.suppress(subprocess.TimeoutExpired):
        keeper.wait(PATIENCE)
    if "error" in message:
        raise (LabMisuse if message["exit_code"] == LabMisuse.exit_code else LabError)(message["error"])
    raise LabError(f"the keeper of the lab ended with code {keeper.returncode} before the lab was there")
