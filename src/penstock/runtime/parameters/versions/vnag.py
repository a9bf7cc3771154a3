"""vNAG: PipeDream's stashing with a Nesterov step whose lookahead makes up for the delay.

The weights are read as under `pipedream`; what differs is the optimizer, NAdam with a momentum near one:

    mu_t = b1 (1 - 0.5 * 0.96^(t psi))
    m = b1 m + (1 - b1) g,  v = b2 v + (1 - b2) g^2
    W <- W (1 - lr wd) - lr [(1 - mu_t) / (1 - prod mu) g + mu_(t+1) / (1 - prod mu * mu_(t+1)) m]
                            / (sqrt(v / (1 - b2^t)) + eps)

with b1, b2 = 0.99, 0.999 and psi = 0.004. That is `torch.optim.NAdam(parameters, lr, betas=(0.99, 0.999),
momentum_decay=0.004, decoupled_weight_decay=True)`.

Reference: Ajanthan et al., "Nesterov method for asynchronous pipeline parallel optimization", 2025.
"""

from __future__ import annotations

from torch.optim import NAdam, Optimizer

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.parameters.versions.pipedream import Stashing


class StashingNesterov(Stashing):
    """Stashing that insists on NAdam."""

    name = "vnag"

    def require(self, optimizer: Optimizer | None) -> None:
        if not isinstance(optimizer, NAdam):
            raise RuntimeFailure(
                f"rule {self.name!r} is PipeDream's stashing with NAdam, and the optimizer is "
                f"{type(optimizer).__name__}; use torch.optim.NAdam(betas=(0.99, 0.999), momentum_decay=0.004, "
                "decoupled_weight_decay=True), or rule 'pipedream' for any optimizer"
            )
