"""Runs a step: decides what each rank does next, and on which device, until all ops have run.

    plan.ActivePlan (what runs now) --StepPlan--> executors.StepExecutor: a Worker per rank, driven in turn or at once

        transport --arrive--> Dispatcher --next--> handlers[kind](wired, inputs) --> finish, send
                                  |                   |
                                  |                   F, B, I, W, R: torch_ops, on a stage here    U: update_ops
                                  |                   a kind of the user's: torch_ops, the function given for it
                                  |
    the step's last collective: step_result (losses, notices, what runs next); timeline (what was measured)

worker         one rank at work                          async_ops   ops that run beside others
executors      ranks as processes, threads, or in turn   gang        who runs an op together, or decides alike
backend        the table of handlers                     plan        the ops of a step, and what is in force
torch_devices  the stages here, and their handlers       torch_ops   handlers of ops that compute
update_ops     the same with the right weights, and U    enable_split   which stages defer W, and how much
launched_ops   ops that a GPU was given and has not ended

The step executor does not know what an op does. `TorchDevices` and `EmulatedDevices` (`emulation/`) give it a table
of handlers for each rank. `torch_ops` is the table of most schedules; `update_ops` wraps it and adds entries where
the schedule has updates.
"""
