"""A lab that exists as long as its block.

    with Lab(num_hosts=2) as lab:
        lab.link(0, 1, "latency:30ms")
        process = lab.start(0, ["python", "server.py"])
        ...
        lab.interface_down(0, 1)

A separate process, the keeper, carries the hosts' packets. It holds one end of a socket, and this process the other.
So in whatever way this process ends, the keeper notices it and removes the lab.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import IO, Any

from penstock.cost import LinkCondition
from penstock.lab import commands, removal
from penstock.lab.kernel import inside, require
from penstock.lab.layout import LabError, LabMisuse, Layout
from penstock.lab.links import check_condition, from_anywhere, read_links, ways_of
from penstock.lab.process import HostProcess, environment_of

PATIENCE = 30.0
"""Seconds that an answer of the keeper, or removing a lab, may take while programs keep the machine busy."""


class Lab:
    """Several hosts on this machine. They are made at once and removed at the end of the block.

    Args:
        num_hosts: 1 to 16.
        num_nics: interfaces per host, each on a network of its own.
        links: conditions from the start, like "0:1=latency:30ms" or "0:1@1=loss:1%".

    Attributes:
        layout: names and addresses of the hosts.

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
        read_links(texts, Layout("0", num_hosts, num_nics))  # what is wrong is told before anything starts
        require()
        self._processes: list[HostProcess] = []
        self._turn = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                asked = json.dumps({"num_hosts": num_hosts, "num_nics": num_nics, "links": texts})
                self._keeper = subprocess.Popen(
                    [sys.executable, "-m", removal.KEEPER, str(theirs.fileno()), asked],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,
                )
            name = self._answer()["name"]
        except BaseException:
            self._socket.close()  # so that the keeper ends
            raise
        self._socket.settimeout(PATIENCE)
        self.layout = Layout(name, num_hosts, num_nics)

    def __enter__(self) -> Lab:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def name(self) -> str:
        """The process number of the keeper; `penstock lab exec --lab` takes it."""
        return self.layout.name

    @property
    def hosts(self) -> range:
        return self.layout.hosts

    def address(self, host: int, nic: int = 0) -> str:
        """A host's address on a network."""
        return self.layout.address(host, nic)

    def link(
        self, source: int, target: int, condition: str | LinkCondition, *, nic: int | None = None, both: bool = True
    ) -> None:
        """Changes the condition of packets between two hosts, from now on.

        Args:
            condition: "latency:30ms+loss:1%" and the like, "down" to cut the link and lose all that is under way on
                it, "up" to join it again as it was.
            nic: the network; None for all. both: in both directions.

        Raises:
            CostError, LabMisuse: an invalid condition or link.
        """
        ways_of(self.layout, source, target, nic, both)
        if condition not in ("down", "up"):
            if isinstance(condition, str):
                condition = LinkCondition.parse(condition)
            check_condition(condition, str(condition))
            condition = from_anywhere(condition)
        self._ask(do="link", source=source, target=target, nic=nic, both=both, condition=str(condition))

    def interface_down(self, host: int, nic: int) -> None:
        """Takes an interface down, as if it had failed. The kernel of that host knows at once, the others do not."""
        commands.run(commands.interface_down(self.layout, host, nic))

    def interface_up(self, host: int, nic: int) -> None:
        """Brings it up again, with its routes."""
        commands.run(commands.interface_up(self.layout, host, nic, commands.congestion_control()))

    def ways(self) -> list[dict[str, Any]]:
        """Each direction of each pair on each network: its condition, and how many packets were carried,
        lost and refused.
        """
        answer: list[dict[str, Any]] = self._ask(do="ways")["ways"]
        return answer

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
        """Starts a program on a host. It is killed when the lab ends, if it has not ended before.

        Its environment is that of this process and `Layout.environment`, with `env` added.
        """
        environment = environment_of(self.layout, host, env)
        process = HostProcess(self.layout, host, command, environment, stdout=stdout, stderr=stderr, cwd=cwd)
        self._processes.append(process)
        return process

    def close(self) -> None:
        """Ends what runs on the hosts and removes the lab. Returns when nothing of it is left."""
        if self._keeper.returncode is not None:
            return
        for process in self._processes:
            process.stop()
        self._socket.close()
        try:
            self._keeper.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()
        if self.name in removal.names():  # the keeper was killed, or could not do all
            removal.remove(self.name)

    def _ask(self, **request: Any) -> dict[str, Any]:
        """The keeper's answer to a request. Raises LabError, LabMisuse."""
        with self._turn:
            try:
                self._socket.send(json.dumps(request).encode())
                return self._answer()
            except TimeoutError:
                raise LabError(f"lab {self.name} did not answer within {PATIENCE:g} s") from None
            except OSError as error:
                reason = os.strerror(error.errno or 0)
                raise LabError(
                    f"lab {self.name} does not answer: {reason}; its keeper is process {self.name}"
                ) from None

    def _answer(self) -> dict[str, Any]:
        """What the keeper says next. Raises OSError, LabError, LabMisuse."""
        said = self._socket.recv(removal.MOST_BYTES)
        if not said:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._keeper.wait(PATIENCE)
            raise LabError(f"the keeper of the lab ended with code {self._keeper.returncode} instead of answering")
        answer: dict[str, Any] = json.loads(said)
        if "error" in answer:
            raise (LabMisuse if answer["exit_code"] == LabMisuse.exit_code else LabError)(answer["error"])
        return answer


def find(name: str | None) -> Layout:
    """The layout of the running lab of that name; without a name, of the only lab that runs.

    Raises:
        LabError: there is none. LabMisuse: several labs run.
    """
    running = [each for each in removal.names() if removal.is_kept(each) and removal.hosts_file(each).exists()]
    if name is None and len(running) > 1:
        raise LabMisuse(f"labs {', '.join(running)} run; say which with --lab")
    if name is None and not running:
        raise LabError("no lab runs; `penstock lab run --hosts 2` makes one in another terminal")
    if name is not None and name not in running:
        raise LabError(f"there is no lab {name}; running: {', '.join(running) or 'none'}")
    name = running[0] if name is None else name
    namespaces = removal.namespaces_of(name)
    with inside(namespaces[0]):
        interfaces = [each for _, each in socket.if_nameindex() if each.startswith("eth")]
    return Layout(name, len(namespaces), len(interfaces))
