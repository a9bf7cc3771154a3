"""The layout of a lab: names, addresses and the environment of programs on a host. Nothing is made here.

    host 0                     host 1                     host 2
    eth0 10.90.0.1             eth0 10.90.0.2             eth0 10.90.0.3      network 0
    eth1 10.90.1.1             eth1 10.90.1.2             eth1 10.90.1.3      network 1

Every host reaches every other over each network. Labs are isolated from one another, so all have the same addresses.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

MOST_HOSTS = 16
MOST_NICS = 4
PREFIX = "penstock-"
"""Prefix of the names of all our namespaces, and of no others."""
MASTER_PORT = 29500
"""Port on host 0 at which programs on the hosts meet. No other program runs there, so it is always free."""


class LabError(RuntimeError):
    """A lab that can't be made, found or changed. The message says what was found, the rule and what to do.

    Examples:
        >>> import penstock as ps
        >>> try:
        ...     ps.lab.Layout("example", num_hosts=0)
        ... except ps.lab.LabError as error:
        ...     print(error)
        0 hosts: a lab has 1 to 16
    """

    exit_code = 1


class LabMisuse(LabError):
    """A request for a host, a network or a condition that no lab has.

    Examples:
        >>> import penstock as ps
        >>> try:
        ...     ps.lab.Layout("example", num_hosts=99)
        ... except ps.lab.LabMisuse as error:
        ...     print(error)
        99 hosts: a lab has 1 to 16
    """

    exit_code = 2


class NetworkWay(NamedTuple):
    """One direction of a pair of hosts on one network."""

    source: int
    target: int
    nic: int

    def __str__(self) -> str:
        return f"{self.source}>{self.target} on network {self.nic}"


@dataclass(frozen=True)
class Layout:
    """A lab's hosts and their interfaces.

    Attributes:
        name: tells the labs of one machine apart; the process number of the lab's keeper.
        num_hosts: at least 1, at most 16.
        num_nics: interfaces per host, at least 1, at most 4.

    Raises:
        LabMisuse: a number out of range.

    Examples:
        >>> import penstock as ps
        >>> layout = ps.lab.Layout("example", num_hosts=2, num_nics=2)
        >>> layout.num_hosts, layout.num_nics
        (2, 2)
    """

    name: str
    num_hosts: int
    num_nics: int = 2

    def __post_init__(self) -> None:
        if not 1 <= self.num_hosts <= MOST_HOSTS:
            raise LabMisuse(f"{self.num_hosts} hosts: a lab has 1 to {MOST_HOSTS}")
        if not 1 <= self.num_nics <= MOST_NICS:
            raise LabMisuse(f"{self.num_nics} interfaces per host: give 1 to {MOST_NICS}")

    def namespace(self, host: int) -> str:
        return f"{PREFIX}{self.name}-{self.hostname(host)}"

    def hostname(self, host: int) -> str:
        self.check(host)
        return f"host{host}"

    def interface(self, nic: int) -> str:
        self.check(0, nic)
        return f"eth{nic}"

    def address(self, host: int, nic: int = 0) -> str:
        self.check(host, nic)
        return f"10.90.{nic}.{host + 1}"

    def network(self, nic: int) -> str:
        self.check(0, nic)
        return f"10.90.{nic}.0/24"

    def check(self, host: int, nic: int = 0) -> None:
        """Raises LabMisuse for a host or a network that is not there."""
        if not 0 <= host < self.num_hosts:
            raise LabMisuse(f"host {host}: hosts go from 0 to {self.num_hosts - 1}")
        if not 0 <= nic < self.num_nics:
            raise LabMisuse(f"network {nic}: networks go from 0 to {self.num_nics - 1}")

    @property
    def hosts(self) -> range:
        return range(self.num_hosts)

    @property
    def nics(self) -> range:
        return range(self.num_nics)

    def ways(self) -> Iterator[NetworkWay]:
        """Every direction of every pair on every network."""
        for nic in self.nics:
            yield from (NetworkWay(a, b, nic) for a in self.hosts for b in self.hosts if a != b)

    def packed_addresses(self) -> dict[bytes, tuple[int, int]]:
        """Addresses in the form in which packets have them, each with its host and network."""
        return {
            ipaddress.IPv4Address(self.address(host, nic)).packed: (host, nic)
            for host in self.hosts
            for nic in self.nics
        }

    def hosts_file(self) -> str:
        """The content of /etc/hosts on every host. A name means the address on network 0.

        It also has the addresses in the form that IPv6 sockets use, because torch asks for the names of
        those that connect.
        """
        names = [f"{self.address(host)} {self.hostname(host)}" for host in self.hosts]
        return "\n".join(["127.0.0.1 localhost", *names, *(f"::ffff:{line}" for line in names), ""])

    def environment(self, host: int) -> dict[str, str]:
        """Environment variables of a program on a host.

        Network 0 is for rendezvous and collectives (the store, gloo, NCCL). Delegates prefer the other networks for
        data. torchrun reads options that are not given from PET_ variables. So a plain `torchrun -m penstock.train`
        on every host is one run.
        """
        master, first = self.address(0), self.interface(0)
        for_data = [*self.nics[1:], 0]
        return {
            "PENSTOCK_HOST": str(host),
            "PENSTOCK_INTERFACES": ",".join(self.address(host, nic) for nic in for_data),
            "MASTER_ADDR": master,
            "MASTER_PORT": str(MASTER_PORT),
            "NNODES": str(self.num_hosts),
            "NODE_RANK": str(host),
            "GLOO_SOCKET_IFNAME": first,
            "NCCL_SOCKET_IFNAME": first,
            "PET_NNODES": str(self.num_hosts),
            "PET_NODE_RANK": str(host),
            "PET_MASTER_ADDR": master,
            "PET_MASTER_PORT": str(MASTER_PORT),
        }


def lab_of(namespace: str) -> str | None:
    """The name of the lab that a namespace belongs to; None for one that is not ours."""
    name, dash, host = namespace.removeprefix(PREFIX).rpartition("-")
    ours = namespace.startswith(PREFIX) and dash and name.isdecimal() and host.removeprefix("host").isdecimal()
    return name if ours else None
