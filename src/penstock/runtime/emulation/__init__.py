"""Emulated devices: real dispatch, real messages and real clocks, and ops that only take their time.

    Costs --backend--> a table of handlers: an op waits for as long as it would take
                          |
    pipeline: the step executor of `execute/` over them, ranks as threads or processes; it steps, switches and adapts
    mesh: replicas of that pipeline, and rings that add up their gradients by the clock

What a rank decides, how its messages travel, where ranks meet and how a run is measured and adapts is the runtime's
own (`execute/`, `transport/`, `adapt/`). What is here besides the handlers, and why:

- `EmulatedPipeline` is not `Pipeline`: nearly all that a pipeline is, is what a model needs (stages, optimizer,
  batches, checkpoints, evaluation), and nothing of that is here. What both do they have from the same functions.
- `EmulatedRing` sends chunk after chunk by the clock, where training calls torch's collectives and has late links
  computed (`parameters/data_parallel.py`): a ring that was computed could not be compared with the simulated one.
"""
