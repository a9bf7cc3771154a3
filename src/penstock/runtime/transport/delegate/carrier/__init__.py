"""What a delegate process runs: standard library only, so that it starts in milliseconds and weighs little.

    rank --ring: SEND 7--> OutLink, OutLane ==chunks==> InConnection, another rank's --ring: MESSAGE 7--> rank
         <--ANSWERED 7---- by the best pair <=answers== into the message's slot       <--FREE------------
                           of interfaces

process     where it starts, its ties to its rank        outgoing    links to other ranks, and their lanes
incoming    connections from other ranks                 chunks      exactly once, over any connection
paths       by which interfaces                          sockets     the event loop, and connections
descriptor  what is told, rings, slots of memory          monitor     the kernel's word on interfaces

The process puts this folder's parent on its path and imports `carrier` by itself: neither penstock nor torch is
loaded. Hence the imports between these files are relative, and nothing here may import penstock.
"""
