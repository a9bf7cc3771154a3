"""Parameters with several holders: who holds one, who owns it, how its gradients are added up, when it is updated.

    found before anything is replaced       ties: one parameter, several stages     local_model: one buffer
                                  |
    backward of each stage --> .grad of each holder       copies of pipelines, windows take turns: gradients,
                                  |                                                        pipeline_copies
                                  |  stages of a microbatch's pipeline       tied_gradients
                                  |  pipelines, and all ranks that hold it   shared
                                  |  replicas                                data_parallel, buckets, sharding
                                  v
    the owner's gradient --clip--> optimizer_state: one step --> shared, sharding: values go to all holders

local_model      the model as this process holds it       pipeline_copies   a copy of a stage per pipeline
optimizer_state  what training changes, step by step      given_optimizer   the optimizer that the user gave
shared           also stages cut over the ranks that share them
updating         updates that are ops of the schedule     versions/   which weights an op reads meanwhile
data_parallel    also slow links between replicas, injected

Whoever holds a tensor, the same four things are said of it, each in one place: its holders (`ties.Ties` over stages,
`shared.Holders` over the ranks of a pipeline, `sharding.UnshardedParameters` over replicas), its owner, the order in
which gradients are added (`gradients.added`: pipelines ascending; within a microbatch the deepest stage first), and
when it is stepped and sent back.

Two things stay apart from this. The sums between a tie's stages are made inside of backwards, because a plain loop
adds them microbatch by microbatch; anywhere else they would come to other bits. And replicas add up many tensors in
one message, by collectives of all of them, while ranks of a pipeline send one another single tensors, some of which
only a few of them have.
"""
