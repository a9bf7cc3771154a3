"""Turns this process into a program on a host: with its network, its name, and the names of the others.

    python -I -S inside.py NAMESPACE HOSTNAME HOSTS_FILE PROGRAM ARGUMENT...

This is a separate script that imports nothing of ours, so that a program starts only some milliseconds later. The
process number stays the same. Exit code 126: the host can't be entered; 127: the program can't be started.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
MS_BIND, MS_REC, MS_SLAVE = 0x1000, 0x4000, 1 << 19


def enter(namespace: str, hostname: str, hosts_file: str) -> None:
    """Enters the host. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)

    def checked(result: int, what: str) -> None:
        if result != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), what)

    name = f"/run/netns/{namespace}"
    there = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
    checked(libc.setns(there, CLONE_NEWNET), namespace)
    os.close(there)
    os.stat(name)  # gone if the lab was taken away meanwhile, by someone who may not have seen this process
    checked(libc.unshare(CLONE_NEWNS | CLONE_NEWUTS), "unshare")
    socket.sethostname(hostname)
    # What is mounted from here on is seen here alone, and what is taken away outside goes here too.
    checked(libc.mount(b"", b"/", b"none", MS_SLAVE | MS_REC, None), "/")
    checked(libc.mount(hosts_file.encode(), b"/etc/hosts", b"none", MS_BIND, None), "/etc/hosts")
    libc.mount(namespace.encode(), b"/sys", b"sysfs", 0, None)  # its interfaces; some containers do not permit it


def main(arguments: list[str]) -> int:
    namespace, hostname, hosts_file, *command = arguments
    try:
        enter(namespace, hostname, hosts_file)
    except OSError as error:
        print(f"penstock: {hostname} can't be entered: {error.filename}: {error.strerror}", file=sys.stderr)
        return 126
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"penstock: {hostname}: {command[0]}: {error.strerror}", file=sys.stderr)
        return 127


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
