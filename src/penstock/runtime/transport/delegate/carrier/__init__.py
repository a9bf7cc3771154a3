"""What a delegate process runs: standard library only, so that it starts in milliseconds and weighs little.

    rank --ring: SEND 7--> OutLink, OutLane ==chunks==> InLane, another rank's --ring: MESSAGE 7--> rank
         <--ANSWERED 7---- by the best pair <=answers== into the message's slot       <--FREE------------
                           of interfaces

process   where it starts, its ties to its rank, and what it does for the rank
lanes     links to other delegates: chunks, exactly once, and by which interfaces
frames    what is told (`Descriptor`), slots of memory, the event loop, and sockets

The process puts this folder's parent on its path and imports `carrier` by itself: neither penstock nor torch is
loaded. Hence the imports between these files are relative, and nothing here may import penstock.
"""
