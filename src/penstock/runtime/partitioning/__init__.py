"""Cuts any module into stages: finds its layers, traces its forward between them, and refuses what it can't trace.

    model --layers--> which modules stay whole
      |
      +--tracer: its forward, run once by torch.fx--> TracedProgram: steps --cutting--> TracedStage per stage

    forward     x = stem(x)     y = block(x)     return head(x + y)
    steps       0 stem(x)       1 block(0)       2 add(0, 1)    3 head(2)
    stages      `--- 0 ---'     `------ 1 ---------------'     `--- 2 --'
    passed on               0                               2

layers        which modules are layers, and which are opened
tracer        a forward, run once and recorded; the user's line in an error
program       the steps, each stage's part, other forms of inputs
traced_stage  the module that runs one part of the steps, or the whole model
cutting       `split`, its checks and its table; the stages of a model or a list
"""

from penstock.runtime.partitioning.cutting import Split, split

__all__ = ["Split", "split"]
