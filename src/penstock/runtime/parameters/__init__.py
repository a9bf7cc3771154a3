"""Parameters with several holders: who holds and owns one, how its gradients are added up, and when it is updated.

    found before anything is replaced       ties: one parameter, several stages     local_model: one buffer
                                  |
    backward of each stage --> .grad of each holder       copies of pipelines, windows take turns: gradients,
                                  |                                                        pipeline_copies
                                  |  stages of a microbatch's pipeline       tied_gradients
                                  |  pipelines, and all ranks that hold it   shared_tensors
                                  |  replicas                                data_parallel, buckets, sharding
                                  v
    the owner's gradient --clip--> optimizer_state: one step --> shared_tensors, sharding: values to all holders

local_model      the model in this process                pipeline_copies   a copy per pipeline, built alike
optimizer_state  the optimizer, and all that it needs     checksum          holders are compared
shared_tensors   also stages cut over the ranks that share them
data_parallel    also the REDUCE ops of a schedule
muon             Muon and AdamW as one optimizer          given_optimizer   the optimizer that the user gave
optimizer_attributes   what such an optimizer keeps in attributes
loss_scaling     float16: larger gradients, and updates that all processes leave out
scheduled_updates   updates that are ops of the schedule
copy_weights     which weights a copy's ops read meanwhile, by version_rules: PipeDream's, SpecTrain's, ...
versioned_parameters   parameters that change together, and which version each op reads

Three classes know who holds and who owns a shared tensor: `ties.Ties` over stages, `shared_tensors.Holders` over
ranks of a pipeline, `sharding.ReplicaParameters` over replicas. Its gradients are added pipeline by pipeline,
ascending, and within a microbatch the deepest stage first. Its owner steps it and sends it to the other holders.

Two things are separate from this. First, the sums between a tie's stages are made inside backwards, because a plain
loop adds them microbatch by microbatch; anywhere else the bits would differ. Second, replicas add up many tensors in
one message, by collectives over all of them. Ranks of a pipeline send one another single tensors, because only a few
ranks have some of these.
"""
