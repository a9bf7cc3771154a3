"""What the host lets this process have: standard streams, a current folder, and a number of processors, files and
bytes."""

from __future__ import annotations

import errno
import os
import resource
import sys
from collections.abc import Iterator

_FILES = ("too many open files", "failed to init uv loop")
_MEMORY = ("cannot allocate memory", "can't allocate memory", "failed to map segment from shared object", "bad_alloc")


class NoCurrentFolderError(Exception):
    """The current folder was removed. The message says what to do."""

    exit_code = 2


def open_standard_streams() -> None:
    """Opens what the caller has closed of stdin, stdout and stderr (`>&-`), on nothing.

    Otherwise the next file or socket would get that number, and what native code prints would go into it.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)  # by processes that are started here
        if getattr(sys, name) is None:
            stream = open(number, mode, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)


def require_current_folder() -> None:
    """Raises NoCurrentFolderError where the current folder was removed: in such a one torch's libraries end the
    process, and their message names another reason."""
    try:
        os.getcwd()
    except OSError as error:
        raise NoCurrentFolderError(
            f"the current folder can't be read ({error.strerror}), and torch can't be loaded in one that was "
            "removed; change to a folder that is there (cd)"
        ) from None


def num_cores() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def text_of(error: BaseException) -> str:
    """What an exception says. The code of its class that makes the text may fail, and must not hide the exception."""
    try:
        return str(error)
    except Exception as another:
        return f"(its text could not be made: {type(another).__name__})"


def limit_behind(error: BaseException) -> str | None:
    """In words, the limit of this process that an error has hit, and what to do; None where it is about none.

    Libraries say it in words of their own, and an exception of theirs may hide it in its cause.
    """
    for each in chain(error):
        text = text_of(each).lower()
        is_of_files = isinstance(each, OSError) and each.errno in (errno.EMFILE, errno.ENFILE)
        if is_of_files or any(words in text for words in _FILES):
            return (
                f"a process may have {_limit(resource.RLIMIT_NOFILE)} files and connections open here (ulimit -n); "
                "raise that: each rank has about 40, and a few more for every other rank"
            )
        if isinstance(each, MemoryError) or any(words in text for words in _MEMORY):
            size = _limit(resource.RLIMIT_AS)
            if size is None:
                return "memory ran out on this host; use a smaller model, or smaller microbatches"
            return f"memory ran out: a process may have {size >> 20} MiB here (ulimit -v); raise that"
    return None


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and those it came from, each once."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _limit(kind: int) -> int | None:
    """The limit that holds now; None where there is none."""
    soft = resource.getrlimit(kind)[0]
    return None if soft == resource.RLIM_INFINITY else soft
