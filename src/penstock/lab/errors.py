"""`LabError`, and `LabMisuse` for requests that no lab can fulfil."""

from __future__ import annotations


class LabError(RuntimeError):
    """A lab that can't be made, found or changed. The message says what was found, the rule and what to do.

    Examples:
        >>> import penstock as ps
        >>> try:
        ...     ps.lab.RunningLab("0")
        ... except ps.lab.LabError as error:
        ...     print("there is no lab" if "0" in str(error) else error)
        there is no lab
    """

    exit_code = 1


class LabMisuse(LabError):
    """A request for a host, a network or a condition that no lab has.

    Examples:
        >>> import penstock as ps
        >>> try:
        ...     ps.lab.Layout("example", num_hosts=99)
        ... except ps.lab.LabMisuse as error:
        ...     print(error)
        99 hosts: a lab has 1 to 16
    """

    exit_code = 2
