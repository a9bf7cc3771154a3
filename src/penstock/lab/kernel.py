"""What a lab needs from the machine, and the calls of the Linux kernel that Python's own library lacks: namespaces,
TUN devices, exact timers.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from penstock.lab.layout import LabError

_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_CHECKSUM, _SEGMENTS = 1, 2 | 4 | 8
_CLOCK_MONOTONIC = 1
_PR_SET_TIMERSLACK = 29
NAMESPACES = "/run/netns"
"""The folder in which `ip netns` keeps namespaces."""
HEADER_BYTES = 10
"""The header that the kernel puts before each packet: whether its checksum is still to be computed, and how it is cut
into segments.
"""
_ADMINISTER_NETWORK, _ADMINISTER_SYSTEM = 12, 21
"""CAP_NET_ADMIN and CAP_SYS_ADMIN, as the kernel numbers them."""
_ADVICE = (
    "Run it as root, or in a container with --cap-add NET_ADMIN --cap-add SYS_ADMIN --device /dev/net/tun, "
    "with iproute2 installed"
)

_libc = ctypes.CDLL(None, use_errno=True)


class _Itimerspec(ctypes.Structure):
    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("s", ctypes.c_long),
        ("ns", ctypes.c_long),
    )


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)
    return result


@contextmanager
def inside(namespace: str) -> Iterator[None]:
    """Runs this thread in a network namespace meanwhile. Raises OSError."""
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    there = os.open(f"{NAMESPACES}/{namespace}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _checked(_libc.setns(there, _CLONE_NEWNET), f"{NAMESPACES}/{namespace}")
        try:
            yield
        finally:
            _checked(_libc.setns(before, _CLONE_NEWNET), "the namespace before")
    finally:
        os.close(before)
        os.close(there)


def open_tun(interface: str) -> int:
    """The other end of a TUN device of this namespace, not blocking. Raises OSError.

    The kernel hands over up to 64 KB at a time, as to a network card that cuts segments itself. In this way a lab
    carries over 1 GB/s with an MTU of 1500.
    """
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        flags = _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR
        fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", interface.encode(), flags))
        whole_segments(tun, False)
    except OSError:
        os.close(tun)
        raise
    return tun


def whole_segments(tun: int, wanted: bool) -> None:
    """Sets whether each packet read is one segment as on a wire (1500 bytes at most), or many at once."""
    fcntl.ioctl(tun, _TUNSETOFFLOAD, _CHECKSUM if wanted else _CHECKSUM | _SEGMENTS)


class KernelTimer:
    """A descriptor that becomes readable at a given time of the monotonic clock, to within some microseconds."""

    def __init__(self) -> None:
        flags = os.O_NONBLOCK | os.O_CLOEXEC
        self.descriptor = _checked(_libc.timerfd_create(_CLOCK_MONOTONIC, flags), "timerfd_create")
        _libc.prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)

    def set(self, moment_ns: int) -> None:
        """Sets it to `moment_ns`. A time in the past makes it readable at once."""
        seconds, rest = divmod(max(1, moment_ns), 1_000_000_000)
        spec = _Itimerspec(0, 0, seconds, rest)
        absolute = 1
        _checked(_libc.timerfd_settime(self.descriptor, absolute, ctypes.byref(spec), None), "timerfd_settime")

    def clear(self) -> None:
        """Makes it unreadable again."""
        with suppress(BlockingIOError):
            os.read(self.descriptor, 8)

    def close(self) -> None:
        os.close(self.descriptor)


def missing() -> list[str]:
    """Reasons why no lab can be made here, in words; empty if one can be made.

    Examples:
        >>> import penstock as ps
        >>> all(isinstance(each, str) for each in ps.lab.missing())
        True
    """
    if not sys.platform.startswith("linux"):
        return ["Linux"]
    found = []
    held = _capabilities()
    needed = (_ADMINISTER_NETWORK, "CAP_NET_ADMIN"), (_ADMINISTER_SYSTEM, "CAP_SYS_ADMIN")
    if lacking := [name for number, name in needed if not held >> number & 1]:
        found.append(f"{' and '.join(lacking)}, which root has")
    if shutil.which("ip") is None:
        found.append("the program `ip` (iproute2)")
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        found.append("/dev/net/tun")
    return found


def require() -> None:
    """Raises LabError with everything that is missing."""
    if lacking := missing():
        raise LabError(f"a lab can't be made here: it needs {'; and '.join(lacking)}. {_ADVICE}")


def _capabilities() -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0
