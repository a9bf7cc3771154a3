"""Which sockets processes listen on, and what they show to every user of the machine, by /proc."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

_LISTEN = "0A"


class Listener(NamedTuple):
    """A listening TCP socket of a process."""

    pid: int
    address: str
    port: int

    @property
    def everywhere(self) -> bool:
        """Whether it takes connections on every address of the host."""
        return ipaddress.ip_address(self.address).is_unspecified


def listeners(pids: Iterable[int]) -> list[Listener]:
    """The listening TCP sockets of these processes, which are in this process's network."""
    known: dict[str, tuple[str, int]] = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == _LISTEN:
                known[words[9]] = _address(words[1])
    found = []
    for pid in pids:
        descriptors: list[Path] = []
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            descriptors = list(Path(f"/proc/{pid}/fd").iterdir())
        for path in descriptors:
            with contextlib.suppress(OSError):  # closed meanwhile
                inode = os.readlink(path).removeprefix("socket:[").removesuffix("]")
                if inode in known:
                    found.append(Listener(pid, *known[inode]))
    return sorted(set(found))


def shown(pid: int) -> str:
    """The command line and the environment of a process. The first is for every user of the machine to read."""
    return " ".join(
        Path(f"/proc/{pid}/{name}").read_bytes().replace(b"\0", b" ").decode() for name in ("cmdline", "environ")
    )


def family(pid: int) -> list[int]:
    """A process and all that it started, and what those started."""
    found, left = [], [pid]
    while left:
        found.append(left.pop())
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{found[-1]}/task").iterdir():
                left += map(int, (task / "children").read_text().split())
    return found


def runs(pid: int) -> bool:
    """Whether there is such a process that has not ended; one that has may wait for its parent to notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _address(text: str) -> tuple[str, int]:
    """`0100007F:1F90`, as /proc/net/tcp has it: words of the host's byte order."""
    words, port = text.split(":")
    raw = b"".join(struct.pack("=I", int(words[at : at + 8], 16)) for at in range(0, len(words), 8))
    kind = socket.AF_INET if len(raw) == 4 else socket.AF_INET6
    address = ipaddress.ip_address(socket.inet_ntop(kind, raw))
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address), int(port, 16)
