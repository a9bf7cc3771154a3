"""What happens when the network dies by which gloo's messages and sums travel: they go on over another one.

    rank 0   eth0 ====== gloo, number 0 ====== eth0   rank 1      heartbeats tell within a second that a link is dead
             eth1 - - - - heartbeats - - - - - eth1               (the kernel of its own host at once)

             eth0            X                 eth0               every rank leaves the groups of number 0,
             eth1 ====== gloo, number 1 ====== eth1               says what it had done, makes number 1 by the next
                                                                    interface, and does again what was not done

heartbeats   whom can be reached by which interface; carries what ranks tell one another while they change over
retried      one group's ops: numbered, kept until they are done everywhere, done again on the next group
service      the thread that changes over, all groups of a process at once, and makes groups by the next interface

Where a rank stands in its program when that happens does not matter: the changing over is done by a thread, and what
waits for an op goes on waiting for the same op on another group. Messages from stage to stage then go by delegates
(`runtime/transport/routed.py`), which have interfaces of their own to choose from.
"""

from penstock.runtime.transport.failover.service import Failover, guard

__all__ = ["Failover", "guard"]
