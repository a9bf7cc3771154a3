"""Parameters with several holders: who holds one, who owns it, how its gradients are added up, when it is updated.

    backward of each stage --> .grad of each holder
                                  |  pipelines of a schedule   pipeline_copies
                                  |  stages of a model         tied, tied_casts
                                  |  ranks of a stage          shared_stage, shared_modules
                                  |  replicas                  data_parallel, buckets, sharding, fsdp
                                  v
    the owner's gradient --clip--> optimizer_state: one step --> values go back to all holders

local_model      the model as this process holds it       owners            who answers for which name
optimizer_state  what training changes, step by step      given_optimizer   the optimizer that the user gave
updating         updates that are ops of the schedule     versions/         which weights an op reads meanwhile
state_bytes      what a rank holds, in bytes              copy_state        what each copy of a stage has
"""
