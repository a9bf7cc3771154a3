"""Split backward: I passes gradients on to the previous stage, W computes the weights' gradients later.

    report = prepare(stage)                  once; `unprepare` puts the module back
    tape = Tape()
    with tape.recording():                   F
        y = stage(x)
    tape.backward_input([y], [gy])           I
    tape.backward_weight()                   W

A prepared stage defers the weight gradients of `nn.Linear`, `nn.Conv1d/2d/3d`, `nn.Embedding` and transformers'
`Conv1D`, and of their shards (`runtime/tensor_parallel/`). All other
parameters are computed in I, as are these where the work is too small to be worth a delay. Gradients are bitwise
those of a plain backward, as long as I and W each run in microbatch order. In parts of a stage that torch.compile has
taken over, weights wait too (`compiled`); give the tape the report's `shared` then, as the runtime does.
"""

from penstock.runtime.stage.split_backward.patch import SplitReport, is_compiled, prepare, unprepare
from penstock.runtime.stage.split_backward.share import DeferredShare
from penstock.runtime.stage.split_backward.stage import SplitError, SplitStage
from penstock.runtime.stage.split_backward.tape import Tape

__all__ = ["DeferredShare", "SplitReport", "SplitError", "SplitStage", "Tape", "is_compiled", "prepare", "unprepare"]
