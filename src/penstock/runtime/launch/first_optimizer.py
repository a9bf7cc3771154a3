"""For ranks that train: imported before they are forked, it makes torch load what its first optimizer loads.

That is torch's compiler and takes a second per process. A build for GPUs may ask for one as it loads, and a rank that
is forked after that has none; so there each rank loads it by itself.
"""

from __future__ import annotations

import torch

if not torch.backends.cuda.is_built():
    torch.optim.SGD([torch.zeros(1)])
