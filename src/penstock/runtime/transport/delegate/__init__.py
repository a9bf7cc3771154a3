"""The delegate transport: light processes carry messages beside the computation, exactly once.

transport   the rank's end: send, arrivals, wait, take       fleet, process   the delegates, started and restarted
outbox, inbox   what is on its way out, what came in          memory, packets, copying   messages in shared memory
health      how the links stand                               lanes   how many delegates a link wants
carrier/    what a delegate process runs (standard library only)
"""

from penstock.runtime.transport.delegate.health import Counters
from penstock.runtime.transport.delegate.lanes import LaneCount, lanes_for
from penstock.runtime.transport.delegate.transport import DelegateTransport

__all__ = ["Counters", "DelegateTransport", "LaneCount", "lanes_for"]
