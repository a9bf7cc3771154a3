"""The delegate transport: light processes carry messages beside the computation, exactly once.

    rank 0                                 its delegate         a delegate of rank 1                     rank 1
    send --> outbox --> slot, descriptor --> sends ===TCP===> receives --> slot, descriptor --> inbox --> take
                        (shared memory)        ^   any interface that works    (shared memory)
                                               |
                         delegates: starts one again when it dies; numbers and answers leave nothing out

transport   the rank's end: send, arrivals, wait, take       delegates   the processes, started and restarted
boxes       what was sent and is not answered, what came in and was not taken
health      the links, as delegates report them              carrier/    what a delegate process runs
payload_copies   payloads into slots of shared memory, and out
"""

from penstock.runtime.transport.delegate.boxes import LaneCount, lanes_for
from penstock.runtime.transport.delegate.health import Counters
from penstock.runtime.transport.delegate.transport import DelegateTransport

__all__ = ["Counters", "DelegateTransport", "LaneCount", "lanes_for"]
