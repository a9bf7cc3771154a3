"""What a delegate process runs: standard library only, so that it starts in milliseconds and weighs little.

    rank --ring: SEND 7--> outgoing: Sender   ==DATA 7==> incoming: Receiver --ring: MESSAGE 7--> rank
         <--ANSWERED 7---- OutLane, per lane  <=ANSWER 7= InConnection       <--FREE-------------
                                |
                                lane: the best pair of interfaces; monitor: the kernel says which of ours are up

delegate    where the process starts, and its ties to its rank
outgoing    a delegate that sends, lane by lane         incoming      a delegate that receives, by connections
lane        exactly once, and by which interfaces       sockets       the event loop, and connections
descriptor  what is told, over rings and connections    shared        the rings, and who has which part of the memory
monitor     the kernel's word on interfaces

The process puts this folder's parent on its path and imports `carrier` by itself: neither penstock nor torch is
loaded. Hence the imports between these files are relative, and nothing here may import penstock.
"""
