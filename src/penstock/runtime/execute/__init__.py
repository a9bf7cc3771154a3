"""Runs a step: decides what each rank does next, and on which device, until all ops have run.

    plan.ActivePlan (what runs now) --StepPlan--> executors.StepExecutor: a Worker per rank, driven in turn or at once

        transport --arrive--> Dispatcher --next--> handlers[kind] --> finish, send
                                  |
                    gang, lockstep: ranks that run an op together, or decide alike

    the step's last collective: step_result (losses, notices, what runs next); timeline (what was measured)

worker         one rank at work                          async_ops   ops that run beside others
executors      ranks as processes, threads, or in turn   notices     messages for the user, each of them once
torch_devices  the stages here, and their handlers       handlers/   torch_ops, updating, backend
enable_split   which stages defer W, and how much        plan        the ops of a step, and what is in force

The step executor does not know what an op does. `TorchDevices` and `EmulatedDevices` (`emulation/`) give it a table
of handlers for each rank.
"""
