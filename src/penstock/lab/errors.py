"""`LabError`, and `LabMisuse` for what no lab has."""

from __future__ import annotations


class LabError(RuntimeError):
    """A lab that can't be made, found or changed; says what was found, the rule and what to do."""

    exit_code = 1


class LabMisuse(LabError):
    """Asked for what no lab has: a host, a network or a condition."""

    exit_code = 2
