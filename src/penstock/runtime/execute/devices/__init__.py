"""What runs an op: `run(op, received)`, then `give(edge)` for each of its messages.

    RegisteredDevice( UpdatingDevice( TorchDevice ))      each only where the schedule has such ops

torch_device   F, B, I, W, R on the stages here     updating   ops meet the right weights, U makes new ones
registered     functions of the user's kinds        null       nothing at all: real order, no tensors
"""
