"""Split backward: I passes gradients on to the previous stage, W computes the weights' gradients later.

    rank 0 | F0 F1 .. I0 W0 I1 W1        after I0 of rank 1, rank 0 continues: it does not wait for W0 of rank 1,
    rank 1 | .. F0 I0 F1 I1 W0 W1        which runs later, where rank 1 would be idle

    report = prepare(stage)                  once; `unprepare` puts the module back
    tape = Tape()
    with tape.recording():                   F
        y = stage(x)
    tape.backward_input([y], [gy])           I: gradients of inputs; keeps (x, gy) of each prepared module
    tape.backward_weight()                   W: gradients of weights from what was kept

prepared         which modules are prepared, what one does when it is called, and its node in autograd's graph
rules            the two halves of a module's backward, by its kind
autocast         the casts of parameters before such a node
tape             one microbatch through one stage
stage            what the prepared modules of one stage share, how much waits for W, and why the rest does not
compiled         modules inside of `torch.compile`

A prepared stage defers the weight gradients of `nn.Linear`, `nn.Conv1d/2d/3d`, `nn.Embedding` and transformers'
`Conv1D`, and of their shards (`runtime/tensor_parallel.py`). The gradients of all other parameters are computed in I.
So are those of the modules above, if the work is too small to be worth a delay. Gradients are bitwise those of a
plain backward, as long as I and W each run in microbatch order. Weights in parts that torch.compile has taken over
wait too (`compiled`). For them, give the tape the report's `shared`, as the runtime does.
"""

from penstock.runtime.split_backward.prepared import SplitReport, is_compiled, prepare, unprepare, unrecorded
from penstock.runtime.split_backward.stage import DeferredShare, SplitError, SplitStage
from penstock.runtime.split_backward.tape import Tape

__all__ = [
    "DeferredShare",
    "SplitError",
    "SplitReport",
    "SplitStage",
    "Tape",
    "is_compiled",
    "prepare",
    "unprepare",
    "unrecorded",
]
