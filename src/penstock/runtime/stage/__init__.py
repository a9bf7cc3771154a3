"""One stage: the layers of it, how they are cut out of the model, and how its ops run.

    model --cut--> Stage     batch --microbatches--> microbatch m
                     |                                  |
    F: graph_inputs -+-> forward -> outputs     B, or I then W (split/)     R: forward again (recompute)

cut            from a model, or a list, to one `Stage` per stage     stage        layers that run one after another
ops            F, B, I, W and R of a stage (`StageRunner`)           microbatches a batch in weighed parts
graph_inputs   where a stage's autograd graph begins and ends        branches     stages that fork and join
recompute      a forward run a second time before its backward       split/       backward in two halves, I and W
registered_ops ops of the user's own kinds                           outputs      what such ops read of forwards
"""
