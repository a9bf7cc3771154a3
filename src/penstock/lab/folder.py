"""A lab's folder on disk, as long as the lab exists: its description, a lock that its keeper holds, and a socket.

    /run/penstock-lab/4711/     lab.json   lock   control   hosts

4711 is the process number of the keeper, and the name of the lab. The lock is released when the process ends, in
whatever way. So if the lock of a lab is free, the lab is a leftover, even if another process has its number now.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from penstock.lab.errors import LabError
from penstock.lab.kernel import NAMESPACES
from penstock.lab.layout import Layout, lab_of

ROOT = Path("/run/penstock-lab")


@dataclass(frozen=True)
class LabRecord:
    """The description of a lab.

    Attributes:
        keeper: the process that carries its packets. owner: the lab ends with this process; None for a lab that
            exists until it is removed.
        since: seconds since 1970.
    """

    name: str
    num_hosts: int
    num_nics: int
    keeper: int
    owner: int | None
    since: float

    @property
    def layout(self) -> Layout:
        return Layout(self.name, self.num_hosts, self.num_nics)


class LabFolder:
    """A lab's folder, by the lab's name."""

    def __init__(self, name: str) -> None:
        self.name, self.path = name, ROOT / name

    @property
    def control(self) -> Path:
        return self.path / "control"

    @property
    def hosts(self) -> Path:
        return self.path / "hosts"

    def make(self, record: LabRecord) -> int:
        """Writes it and returns the lock, which holds as long as it is open. Raises OSError.

        It appears whole and locked: one without a lock is a leftover, and goes.
        """
        beside = ROOT / f".{self.name}.making"
        shutil.rmtree(beside, ignore_errors=True)  # of a keeper that had this number and is gone, as is the next
        self.remove()
        beside.mkdir(parents=True, mode=0o700)
        lock = os.open(beside / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (beside / self.hosts.name).write_text(record.layout.hosts_file(), encoding="utf-8")
        (beside / "lab.json").write_text(json.dumps(asdict(record)), encoding="utf-8")
        beside.rename(self.path)
        return lock

    def read(self) -> LabRecord:
        """Reads it. Raises LabError if there is no such lab."""
        try:
            return LabRecord(**json.loads((self.path / "lab.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            raise LabError(f"there is no lab {self.name}; `penstock lab list` shows those that are there") from None

    def alive(self) -> bool:
        """Whether its keeper holds the lock."""
        try:
            lock = os.open(self.path / "lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # several may look at once
        except BlockingIOError:
            return True
        finally:
            os.close(lock)
        return False

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def names() -> list[str]:
    """Every lab that has a folder or a namespace, whether its keeper lives or not."""
    found = {path.name for path in ROOT.glob("*") if path.name.isdecimal()}
    found |= {name for path in Path(NAMESPACES).glob("*") if (name := lab_of(path.name)) is not None}
    return sorted(found, key=int)


def namespaces_of(name: str) -> list[str]:
    """The namespaces of a lab that exist."""
    return sorted(path.name for path in Path(NAMESPACES).glob("*") if lab_of(path.name) == name)
