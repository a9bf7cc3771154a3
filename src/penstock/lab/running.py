"""What can be done with a lab that runs, by the process that made it or by another; and all labs of this machine."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import IO, Any

from penstock.cost import LinkCondition
from penstock.lab import commands, shell
from penstock.lab.control import ask
from penstock.lab.errors import LabError, LabMisuse
from penstock.lab.folder import LabFolder, LabRecord, names, namespaces_of
from penstock.lab.links import check_condition, from_anywhere, ways_of
from penstock.lab.process import HostProcess, environment_of


class RunningLab:
    """A lab by its name.

    Args:
        name: as `penstock lab list` shows it.

    Raises:
        LabError: there is no such lab, or its keeper is gone.

    Examples:
        >>> import penstock as ps
        >>> if not ps.lab.missing():
        ...     with ps.lab.Lab(num_hosts=2) as lab:
        ...         assert ps.lab.RunningLab(lab.layout.name).layout == lab.layout
    """

    def __init__(self, name: str) -> None:
        self._folder = LabFolder(name)
        self.record: LabRecord = self._folder.read()
        if not self._folder.alive():
            raise LabError(f"the keeper of lab {name} is gone; `penstock lab clean` takes away what it left")
        self.layout = self.record.layout

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def hosts(self) -> range:
        return self.layout.hosts

    def address(self, host: int, nic: int = 0) -> str:
        """A host's address on a network."""
        return self.layout.address(host, nic)

    def link(
        self,
        source: int,
        target: int,
        condition: str | LinkCondition,
        *,
        nic: int | None = None,
        both: bool = True,
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
        shell.run(commands.interface_down(self.layout, host, nic))

    def interface_up(self, host: int, nic: int) -> None:
        """Brings it up again, with its routes."""
        shell.run(commands.interface_up(self.layout, host, nic, shell.congestion_control()))

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
        """Starts a program on a host. Its environment is `Layout.environment` with `env` added."""
        environment = environment_of(self.layout, host, env)
        return HostProcess(self.layout, host, command, environment, stdout=stdout, stderr=stderr, cwd=cwd)

    def _ask(self, **request: Any) -> dict[str, Any]:
        return ask(self._folder.control, request)


def find(name: str | None) -> RunningLab:
    """The lab of that name; without a name, the only lab that runs. Raises LabError, LabMisuse."""
    if name is not None:
        return RunningLab(name)
    running = [each for each in names() if LabFolder(each).alive()]
    if len(running) == 1:
        return RunningLab(running[0])
    if running:
        raise LabMisuse(f"labs {', '.join(running)} run; say which with --lab")
    raise LabError("no lab runs; `penstock lab make --hosts 2` makes one")


def listed() -> list[dict[str, Any]]:
    """One entry per lab: its record, whether its keeper lives, its namespaces, and what `RunningLab.ways` says of
    each way that carried or refused anything or is under a condition.
    """
    found: list[dict[str, Any]] = []
    for name in names():
        entry: dict[str, Any] = {"name": name, "alive": LabFolder(name).alive(), "namespaces": namespaces_of(name)}
        if entry["alive"]:
            try:
                lab = RunningLab(name)
                ways = [way for way in lab.ways() if way["num_packets"] or way["num_refused"] or way["condition"]]
            except LabError:  # it is being made, or taken away just now
                continue
            entry |= {**asdict(lab.record), "ways": ways}
        found.append(entry)
    return found
