"""What runs an op: `handlers[op.kind](wired, inputs) -> outputs`, a payload for each edge that goes out.

    Dispatcher --op--> backend: handlers["F"] --> torch_ops --> StageRunner.forward --> payloads --> transport
                                handlers["U"] --> updating  --> the optimizer's step, values for other copies
                                handlers["D"] --> torch_ops --> the function that the user gave for "D"

backend      the table, what starts asynchronous ops, and a backend of no tensors that keeps the real order
torch_ops    F, B, I, W, R on the stages here, functions of the user's kinds, and REDUCE
updating     the same with the right weights, and U
emulation/   elsewhere: ops that take the time that the costs say

`torch_ops` is the table of most schedules; `updating` wraps and adds entries where the schedule has updates.
"""
