"""A step of an optimizer for a while: afterwards weights and state are as before, to the bit.

    with step_for_now(optimizer, parameters):
        optimizer.step()            works on copies of the state
        ...                         the parameters hold what the step made
    parameters and state are back
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from penstock.runtime.parameters.optimizer import attributes_of, set_attribute
from penstock.runtime.tensors.dtensor import memory


@contextmanager
def step_for_now(optimizer: Optimizer, parameters: Sequence[Parameter]) -> Iterator[None]:
    """Within the `with` statement the optimizer may step these parameters, and no others.

    The state's tensors stay the same objects, as others may hold them as well.
    """
    weights = [memory(parameter).clone() for parameter in parameters]
    states = {p: optimizer.state[p] for p in parameters if p in optimizer.state}
    attributes = copy.deepcopy({k: v for k, v in attributes_of(optimizer).items() if not isinstance(v, Optimizer)})
    for parameter, state in states.items():
        optimizer.state[parameter] = {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}
    try:
        yield
    finally:
        for parameter, weight in zip(parameters, weights, strict=True):
            memory(parameter).copy_(weight)
            optimizer.state.pop(parameter, None)
        optimizer.state.update(states)
        for name, value in attributes.items():
            set_attribute(optimizer, name, value)
