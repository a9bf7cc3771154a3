"""Emulated devices: real dispatch, real messages and real clocks, and ops that only take their time.

    Costs --backend--> a table of handlers: an op waits for as long as it would take
                          |
    pipeline: the step executor of `execute/` over them, ranks as threads or processes; it steps, switches and adapts

What a rank decides, how its messages travel, where ranks meet and how a run is measured and adapts is the runtime's
own (`execute/`, `transport/`, `adapt/`). `EmulatedPipeline` is not `Pipeline`: most of a pipeline is what a model
needs (stages, optimizer, batches, checkpoints, evaluation), and none of that is here. Both call the same functions
for the rest.
"""
