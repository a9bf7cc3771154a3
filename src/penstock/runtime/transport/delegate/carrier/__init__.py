"""What a delegate process runs: standard library only, so that it starts in milliseconds and weighs little.

The process puts this folder's parent on its path and imports `carrier` by itself: neither penstock nor torch is
loaded. Hence the imports between these files are relative, and nothing here may import penstock.

    frame      what goes over a connection          ring       descriptors between rank and delegate
    lane       exactly once: numbers, answers       slots      who has which part of the shared memory
    paths      which interface next                 monitor    the kernel's word on interfaces
    outgoing   a delegate that sends                incoming   a delegate that receives
"""
