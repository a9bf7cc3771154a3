"""One stage: its layers, how it is cut out of the model, and how its ops run.

    model --cut--> Stage     batch --microbatches--> microbatch m
                     |                                  |
    F: GraphInputs --+-> forward -> exits       B, or I then W (split_backward/)     R: forward again (recompute)

cut            from a model, or a list, to one `Stage` per stage     stage        layers that run one after another
ops            F, B, I, W and R of a stage (`StageRunner`)           microbatches a batch in weighted parts
autograd       where a stage's autograd graph begins and ends        branches     stages that fork and join
recompute      a forward run a second time before its backward       host_memory  activations moved to host memory
registered_ops ops of the user's own kinds, and what they read       replica_batches  each replica loads its part
partitioning/  `ps.split`: any module cut into stages                split_backward/  backward in two halves, I and W
"""
