"""What runs an op: `handlers[op.kind](station, inputs) -> outputs`, a payload for each edge that goes out.

    torch_ops    F, B, I, W, R on the stages here        updating   the same, with the right weights, and U
    registered   functions of the user's kinds, REDUCE   null       nothing at all: real order, no tensors
    emulation/   the time that the costs say

A backend is a table of them; `torch_ops` alone is the table of most schedules, and the two beside it wrap or add
entries where the schedule has such ops.
"""
