"""Where a delegate process starts."""

from __future__ import annotations

import gc
import signal
import sys

from .delegate_io import DelegateOrders


def main() -> None:
    """Runs the delegate whose orders the descriptor in the first argument holds, until its rank ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the rank's to handle
    orders = DelegateOrders.read(int(sys.argv[1]))
    gc.freeze()
    if orders.outgoing:
        from .outgoing import Sender

        Sender(orders).run()
    else:
        from .incoming import Receiver

        Receiver(orders).run()
