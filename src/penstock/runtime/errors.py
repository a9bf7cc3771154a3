"""What can go wrong while a schedule runs."""

from __future__ import annotations


class RuntimeFailure(RuntimeError):
    """A run can't start or go on; the message says what was found, the rule and what to do.

    Examples:
        >>> import penstock as ps
        >>> try:
        ...     ps.TransportOptions("carrier-pigeon")
        ... except ps.RuntimeFailure as error:
        ...     print(error)
        transport 'carrier-pigeon': give 'host', 'gloo', 'direct', 'delegate' or 'nccl'
    """

    exit_code = 1


class PeerLost(RuntimeFailure):
    """Another rank is gone. The cause lies there, not here.

    Examples:
        >>> import penstock as ps
        >>> try:
        ...     raise ps.runtime.PeerLost("rank 1 is gone")
        ... except ps.RuntimeFailure as failure:
        ...     print(failure)
        rank 1 is gone
    """


class DeadlineExceeded(RuntimeFailure):
    """A wait ended without what was waited for: who waited for what from whom.

    Examples:
        >>> import penstock as ps
        >>> try:
        ...     raise ps.runtime.DeadlineExceeded("rank 1 waited 3 s for F0 of stage 0 from rank 0")
        ... except ps.RuntimeFailure as failure:
        ...     print(failure)
        rank 1 waited 3 s for F0 of stage 0 from rank 0
    """
