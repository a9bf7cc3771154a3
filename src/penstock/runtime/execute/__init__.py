"""Runs a step: what each rank does next, on which device, until all ops have run.

    active_plan (what runs now) --plan--> a Worker per rank, driven by executors, all of it by step_executor

        transport --arrive--> Dispatcher --next--> handlers[kind] --> finish, send
                                  |
                    gang, lockstep: ranks that run an op together, or decide alike

    the step's last collective: step_result (losses, notices, what runs next); timeline (what was measured)

worker         one rank at work                          async_ops   ops that run beside others
executors      ranks as processes, threads, or in turn   notices     what a person should know of a run, once
torch_devices  the stages here, and their handlers       handlers/   torch, registered, updating, null
enable_split   which stages defer W, and how much

The step executor does not know what an op is: `TorchDevices` and `EmulatedDevices` (`emulation/`) give it a table of
handlers for each rank.
"""
