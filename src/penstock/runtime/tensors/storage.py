"""Which tensors share memory. Outputs of a stage that do go to the next stage as separate tensors.

    stage 0 returns            h, h[:, 2:6]
    stage 1 is called with     h, a copy of h[:, 2:6]

So a change in place of one is not seen in the other, whether stages run in one process or in several. The gradients
of both come back, and stage 0 adds them up (sentence 6 of the contract).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

_OWN_MEMORY = (Tensor, Parameter)


def storage_of(tensor: Tensor) -> int:
    """Returns the address of a tensor's memory; 0 if there is none, or if it is not the tensor's own (subclasses)."""
    if type(tensor) not in _OWN_MEMORY or tensor.layout is not torch.strided:
        return 0
    return tensor.untyped_storage().data_ptr()


def copy_of(tensor: Tensor) -> Tensor:
    """Returns the same values in other memory, laid out alike, so that kernels round alike."""
    once = tensor.detach()
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_nested:
        return once.clone()
    for place, stride in enumerate(tensor.stride()):
        once = once.narrow(place, 0, 1) if stride == 0 and once.shape[place] > 1 else once  # an expanded tensor
    copy = torch.empty_strided(once.shape, once.stride(), dtype=once.dtype, device=once.device).copy_(once)
    return copy.expand(tensor.shape)


def separate(outputs: Sequence[Tensor], state: Callable[[], Collection[int]]) -> list[Tensor]:
    """Returns the outputs of a stage without their graph. One that shares memory with an earlier one is copied.

    Args:
        state: returns the addresses of the stage's parameters and buffers. An output in one of these is copied too,
            as the stage's next microbatch runs with it.
    """
    taken: set[int] = set()
    found: list[Tensor] = []
    for output in outputs:
        address = storage_of(output)
        base = output if output._base is None else output._base
        is_shared = address in taken or (base.is_leaf and address in state())
        found.append(copy_of(output) if address and is_shared else output.detach())
        taken.add(address)
    return found
