"""Which op of another queue an op needs, where windows of ops unlock windows."""

from __future__ import annotations


def last_needed(number: int, before: int, after: int, shift: int = 0) -> int:
    """The number of the last op that must have ended before op `number` may start; below 0 where none must.

    Every `before` ops of the one queue let `after` ops of the other run, `shift` ops later (see `Irregularities`).
    """
    if before == 1 and after == 1:
        return number + shift
    return (number // after + 1) * before - 1 + shift
