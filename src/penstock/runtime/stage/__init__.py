"""One stage: its layers, and how its ops run.

    layers --------> Stage   batch --microbatches--> microbatch m
                       |                                |
    F: GraphInputs ----+-> forward -> exits     B, or I then W (../split_backward)     R: forward again (recompute)

stage          layers that run one after another                ops           F, B, I, W and R (`StageRunner`)
microbatches   a batch in weighted parts, or a replica's part   branches      stages that fork and join
recompute      a forward run again, and what it changes       host_memory   activations moved to host memory
loss           the weight of a microbatch in the loss         registered_ops  ops of the user's own kinds
batch_rules    how each tensor of a batch is cut              module_state  what a step puts back in its modules
"""
