"""How long delegates wait for what, in nanoseconds."""

from __future__ import annotations

MS = 1_000_000

BEAT = 250 * MS
"""A connection on which nothing is sent for so long is asked whether it lives."""
SILENCE = 2_000 * MS
"""A process that lets questions wait for so long, over a connection that stands, is said to stand still."""
UNACKNOWLEDGED_MS = 500
"""Milliseconds for which the network may leave bytes unacknowledged before a connection counts as dead."""
CONNECT = 1_000 * MS
WELCOME = 2_000 * MS
"""Deadlines of the two steps of connecting; they double with each failure."""
LONGEST = 16_000 * MS
PROBE = 500 * MS
"""How often a rank that does not connect is looked for."""


def patience(first: int, failures: int) -> int:
    """A deadline after so many failures in a row."""
    return min(LONGEST, first << min(failures, 8))
