"""What runs an op: `handlers[op.kind](wired, inputs) -> outputs`, a payload for each edge that goes out.

    Dispatcher --op--> backend: handlers["F"] --> torch_ops --> StageRunner.forward --> payloads --> transport
                                handlers["U"] --> updating  --> the optimizer's step, values for other copies
                                handlers["D"] --> registered  --> the function that the user gave for "D"

backend      the table, and what starts asynchronous ops     torch_ops    F, B, I, W, R on the stages here
registered   functions of the user's kinds, and REDUCE       updating     the same with the right weights, and U
null         nothing at all: the real order, no tensors      emulation/   elsewhere: the time that the costs say

`torch_ops` alone is the table of most schedules, and the two beside it wrap or add entries where the schedule has
such ops.
"""
