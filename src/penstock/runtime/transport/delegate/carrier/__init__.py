"""What a delegate process runs: standard library only, so that it starts in milliseconds and weighs little.

    rank --ring: SEND 7--> outgoing: Sender   ==DATA 7==> incoming: Receiver --ring: MESSAGE 7--> rank
         <--ANSWERED 7---- OutLane, per lane  <=ANSWER 7= InConnection       <--FREE-------------
                                |
                                paths: the best pair of interfaces; monitor: the kernel says which of ours are up

main        where the process starts                    event_loop        one epoll: descriptors, and what is due
outgoing    a delegate that sends                       out_lane          one lane of it: connects, sends, sends again
incoming    a delegate that receives                    in_connection     one connection of it, and what is coming in
frame       what goes over a connection                 stream, sockets   a connection that stands, and TCP's settings
lane        exactly once: numbers, answers              connect_attempt   a connection that is being made
ring        descriptors between rank and delegate       delegate_io       the rings and the memory, from this side
slots       who has which part of the shared memory     timing            how long delegates wait for what
paths       which interfaces to connect by next         monitor           the kernel's word on interfaces
peer_watch  whether a silent rank's process has ended   link_down_notice  tells other ranks that one of ours is down

The process puts this folder's parent on its path and imports `carrier` by itself: neither penstock nor torch is
loaded. Hence the imports between these files are relative, and nothing here may import penstock.
"""
