"""Runs a step: decides what each rank does next, and on which device, until all ops have run.

    plan.ActivePlan (what runs now) --StepPlan--> executors.StepExecutor: a Worker per rank, driven in turn or at once

        transport --arrive--> Dispatcher --next--> handlers[kind](wired, inputs) --> finish, send
                                  |                   |
                                  |                   F, B, I, W, R: torch_backend, on a stage here     U: update_ops
                                  |                   a kind of the user's: torch_backend, its function
    the step's last collective: step_end (losses, notices, failures, what runs next); timeline (what was measured)

worker         one rank at work; `Backend`              plan          the ops of a step, and what is in force
executors      ranks as processes, threads, or in turn   gang          who runs an op together, or decides alike
torch_backend  the stages here, and their handlers       update_ops    the same with the right weights, and U
launched_ops   ops that lie in a GPU's queue             async_ops     ops that run beside others
step_end       results and failures, told to every rank  timeline      what was measured

The step executor does not know what an op does. `TorchDevices` and `EmulatedDevices` (`emulation/`) give it a table
of handlers for each rank. `update_ops` wraps those of torch and adds entries where the schedule has updates.
"""
