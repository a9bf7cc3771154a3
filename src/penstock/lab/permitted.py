"""What a lab needs from the machine, and which of it is missing."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from penstock.lab.errors import LabError

_ADMINISTER_NETWORK, _ADMINISTER_SYSTEM = 12, 21
"""CAP_NET_ADMIN and CAP_SYS_ADMIN, as the kernel numbers them."""
_ADVICE = (
    "Run it as root, or in a container with --cap-add NET_ADMIN --cap-add SYS_ADMIN --device /dev/net/tun, "
    "with iproute2 installed"
)


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
