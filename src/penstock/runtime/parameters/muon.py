"""Muon for the matrices inside a model, AdamW for the rest: one optimizer, at one learning rate.

    parameter                                            stepped by
    a matrix of a hidden layer                           Muon
    an embedding's table, the output layer, the rest     AdamW

    M <- b M + (1 - b) g
    W <- W (1 - lr wd) - 0.2 lr sqrt(max(rows, columns)) NS((1 - b) g + b M)

NS makes all singular values about one, by five Newton-Schulz iterations in bfloat16. The factor in front gives a step
the same root mean square as AdamW's, so both can use one learning rate. Both halves are torch's own steps.

Muon needs whole matrices. Parameters that are sharded over replicas (fsdp) or tensor-parallel ranks are refused.
ZeRO-1 works, and so do copies of a stage in several pipelines and ties, because they distribute whole parameters.

References: Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024; Liu et al., "Muon is
scalable for LLM training", 2025 (arXiv 2502.16982), the source of the factor. arXiv 2606.30634 reports that a delay
of one update costs Muon less than AdamW.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import AdamW, Muon, Optimizer

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.tensors.dtensor import is_sharded

MUON, ADAMW = "muon", "adamw"
_MARK = "penstock_stepped_by"


class MuonAdamW(Optimizer):
    """Muon for matrices of hidden layers, AdamW for all other parameters.

    A pipeline marks the matrices of embeddings and of the output layer, which AdamW steps (`mark_ends`). Mark others
    with `leave_to_adamw`. There are always two parameter groups, with `kind` "muon" and "adamw".

    Args:
        params: parameters, not groups of them.
        lr, weight_decay: learning rate and weight decay of both.
        momentum, nesterov, ns_steps: options of Muon.
        betas, eps: options of AdamW.

    Raises:
        RuntimeFailure: a parameter that is sharded over processes.

    Examples:
        >>> import penstock as ps
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
        >>> optimizer = ps.runtime.MuonAdamW(model.parameters(), lr=1e-3)
        >>> [(group["kind"], len(group["params"])) for group in optimizer.param_groups]
        [('muon', 2), ('adamw', 2)]
    """

    def __init__(
        self,
        params: Iterable[Parameter],
        lr: float = 4e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        given = list(params)
        matrices = [p for p in given if is_hidden_matrix(p)]
        mine = set(map(id, matrices))
        like = Parameter(torch.zeros(1, 1))  # an optimizer of torch wants a parameter to begin with
        self._halves: Mapping[str, Optimizer] = {
            MUON: Muon(
                [like],
                lr=lr,
                weight_decay=weight_decay,
                momentum=momentum,
                nesterov=nesterov,
                ns_steps=ns_steps,
                adjust_lr_fn="match_rms_adamw",
            ),
            ADAMW: AdamW([like], lr=lr, weight_decay=weight_decay, betas=(betas[0], betas[1]), eps=eps),
        }
        rest = [p for p in given if id(p) not in mine]
        groups = [
            {**self._halves[kind].defaults, "kind": kind, "params": parameters}
            for kind, parameters in ((MUON, matrices), (ADAMW, rest))
        ]
        super().__init__(groups, {"lr": lr})
        require_whole_matrices(self)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Runs one step of both."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for kind, half in self._halves.items():
            half.param_groups = [group for group in self.param_groups if group["kind"] == kind]
            half.state = self.state
            half.step()
        return loss


def is_hidden_matrix(parameter: Tensor) -> bool:
    """Whether Muon steps the parameter."""
    return parameter.dim() == 2 and not parameter.is_complex() and getattr(parameter, _MARK, MUON) == MUON


def leave_to_adamw(parameter: Tensor) -> None:
    """Marks a matrix that AdamW steps, such as an embedding's table or the output layer.

    Args:
        parameter: the matrix.

    Examples:
        >>> import penstock as ps
        >>> import torch
        >>> table = torch.nn.Embedding(10, 4)
        >>> ps.runtime.leave_to_adamw(table.weight)
        >>> optimizer = ps.runtime.MuonAdamW(table.parameters())
        >>> [(group["kind"], len(group["params"])) for group in optimizer.param_groups]
        [('muon', 0), ('adamw', 1)]
    """
    setattr(parameter, _MARK, ADAMW)


def mark_ends(stage: nn.Module, is_last: bool, tied: Iterable[str] = ()) -> None:
    """Marks what in a stage is not a hidden matrix: embedding tables, output layers, and tied parameters.

    A module may name its output layers in `output_layers`. If none in the last stage of a model does, the last Linear
    is the output layer.

    Args:
        tied: names of the stage's parameters that other stages have too.
    """
    linear: list[nn.Module] = []
    named = False
    for module in stage.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            _leave_weight(module)
        elif isinstance(module, nn.Linear):
            linear.append(module)
        for name in getattr(module, "output_layers", ()):
            named = True
            if (layer := getattr(module, name)) is not None:
                _leave_weight(layer)
    if is_last and linear and not named:
        _leave_weight(linear[-1])
    for name in tied:  # on every rank alike, whatever modules it is used in
        leave_to_adamw(stage.get_parameter(name))


def _leave_weight(layer: nn.Module) -> None:
    """Marks a layer's weight, or what the weight is computed from if the layer is parametrized.

    To read such a weight would compute it, and would advance spectral norm by one iteration.
    """
    for name, parameter in layer.named_parameters():
        if name == "weight" or name.startswith("parametrizations.weight."):
            leave_to_adamw(parameter)


def require_whole_matrices(optimizer: Optimizer | None, parts: bool = False) -> None:
    """Raises RuntimeFailure if Muon would step parts of matrices, or embeddings and output layers.

    Args:
        parts: whether replicas keep parts of all parameters.
    """
    if not isinstance(optimizer, MuonAdamW | Muon):
        return
    stepped = (p for group in optimizer.param_groups for p in group["params"] if p.dim() == 2)
    if parts or any(is_sharded(p) and is_hidden_matrix(p) for p in stepped):
        raise RuntimeFailure(
            f"{type(optimizer).__name__} makes the singular values of whole matrices even, and here processes hold "
            "parts of them (fsdp, or tensor-parallel ranks); use ParallelOptions(sharding='zero1') "
            "(--sharding zero1), which deals out whole parameters, or AdamW"
        )
    by_muon = [p for group in optimizer.param_groups if group.get("kind") == MUON for p in group["params"]]
    if ends := [tuple(p.shape) for p in by_muon if not is_hidden_matrix(p)]:
        raise RuntimeFailure(
            f"MuonAdamW was made before ps.Pipeline marked {len(ends)} embeddings and output layers, the first of "
            f"shape {ends[0]}, and would step them by Muon; give optimizer=lambda params: MuonAdamW(params)"
        )
