"""Meshes of processes: every way to split so many of them."""

from __future__ import annotations

from collections.abc import Iterator

Split = tuple[int, int, int]
"""(pp, dp, tp)."""


def splits(num_processes: int) -> Iterator[Split]:
    """Every (pp, dp, tp) of that product."""
    for pp in range(1, num_processes + 1):
        for dp in range(1, num_processes // pp + 1):
            if num_processes % (pp * dp) == 0:
                yield pp, dp, num_processes // (pp * dp)
