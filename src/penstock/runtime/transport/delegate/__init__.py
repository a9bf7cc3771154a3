"""The delegate transport: light processes carry messages beside the computation, exactly once.

    rank 0                                 its delegate         a delegate of rank 1                     rank 1
    send --> outbox --> slot, descriptor --> sends ===TCP===> receives --> slot, descriptor --> inbox --> take
                        (shared memory)        ^   any interface that works    (shared memory)
                                               |
                         supervisor: starts a delegate again when it dies; numbers and answers leave nothing out

transport     the rank's end: send, arrivals, wait, take     fleet, process    the delegates, started and restarted
outbox        what was sent and is not answered yet          inbox             what came in and was not taken
memory        shared memory, as one sparse mapping           packets           payloads as they lie in a slot
copying       into slots and out of them                     gpu_copying       the same from and to a GPU, beside ops
listeners     sockets where receiving delegates answer       presence          connections that ask if a rank is there
health        how the links are, as delegates report it      lanes             how many delegates a link wants
supervisor    the thread that starts delegates again         carrier/          what a delegate process runs
"""

from penstock.runtime.transport.delegate.health import Counters
from penstock.runtime.transport.delegate.lanes import LaneCount, lanes_for
from penstock.runtime.transport.delegate.transport import DelegateTransport

__all__ = ["Counters", "DelegateTransport", "LaneCount", "lanes_for"]
