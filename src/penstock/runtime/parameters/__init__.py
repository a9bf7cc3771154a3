"""Parameters with several holders: who holds and owns one, how its gradients are added up, and when it is updated.

    found before anything is replaced       ties: one parameter, several stages     local_model: one buffer
                                  |
    backward of each stage --> .grad of each holder       copies of pipelines, windows take turns: gradients, copies
                                  |  stages of a microbatch's pipeline       tied_gradients
                                  |  pipelines, and all ranks that hold it   shared
                                  |  replicas                                replicas, buckets, sharding
                                  v
    the owner's gradient --clip--> optimizer_state: one step --> shared, sharding: values to all holders

local_model      the model in this process              copies        a copy per pipeline, built alike
optimizer_state  what training changes in a step        optimizer     the optimizer that the user gave
shared           also stages cut over ranks             replicas      also the REDUCE ops of a schedule
checksum         holders are compared                   scaling       float16: larger gradients, updates left out
muon             Muon and AdamW as one optimizer        versions      which weights a copy's ops read meanwhile
updates          updates that are ops of the schedule   rules         ... by PipeDream's rule, SpecTrain's, ...

Three classes know who holds and who owns a shared tensor: `ties.Ties` over stages, `shared.Holders` over ranks of a
pipeline, `sharding.ReplicaParameters` over replicas. Its gradients are added pipeline by pipeline, ascending, and
within a microbatch the deepest stage first. Its owner steps it and sends it to the other holders.

Two things are separate from this. First, the sums between a tie's stages are made inside backwards, because a plain
loop adds them microbatch by microbatch; anywhere else the bits would differ. Second, replicas add up many tensors in
one message, by collectives over all of them. Ranks of a pipeline send one another single tensors, because only a few
ranks have some of these.
"""
