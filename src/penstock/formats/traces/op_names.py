"""What names of ops in traces mean: Megatron's timers, which ByteDance's study took over, and Penstock's letters."""

from __future__ import annotations

from penstock.formats.traces.run_trace import Scope, TracedKind

_COMPUTE = {"forward-compute": "F", "backward-compute": "B", "input-grad-compute": "I", "weight-grad-compute": "W"}
_WORDS = {
    "F": ("f", "forward", "fwd", "fw", "forward_step", "forward_pass", "forward_compute"),
    "B": ("b", "backward", "bwd", "bw", "backward_step", "backward_pass", "backward_compute", "full_backward"),
    "I": ("i", "backward_input", "input_grad", "dgrad"),
    "W": ("w", "backward_weight", "weight_grad", "wgrad"),
    "R": ("r", "recompute"),
}
LETTERS = {word: letter for letter, words in _WORDS.items() for word in words}
_MESSAGES = {
    "forward-send": (Scope.SEND, "F"),
    "forward-recv": (Scope.RECEIVE, "F"),
    "backward-send": (Scope.SEND, "B"),
    "backward-recv": (Scope.RECEIVE, "B"),
    "SEND_F": (Scope.SEND, "F"),
    "RECV_F": (Scope.RECEIVE, "F"),
    "SEND_B": (Scope.SEND, "B"),
    "RECV_B": (Scope.RECEIVE, "B"),
}
_OTHERS = {
    "params-all-gather": Scope.REPLICAS,
    "grads-reduce-scatter": Scope.REPLICAS,
    "grads-all-reduce": Scope.REPLICAS,
    "separate-grads-all-reduce": Scope.REPLICAS,
    "all-grads-sync": Scope.REPLICAS,
    "REDUCE": Scope.REPLICAS,
    "REDUCE_GRAD": Scope.REPLICAS,
    "embedding-grads-all-reduce": Scope.PIPELINE,
    "layernorm-grads-all-reduce": Scope.LOCAL,
    "optimizer-clip-main-grad": Scope.ALL,
    "optimizer": Scope.LOCAL,
    "U": Scope.LOCAL,
    "gc": Scope.LOCAL,
}
_LOCAL_COMMUNICATION = ("layernorm-grads-all-reduce",)
"""Within a worker's tensor-parallel group: nobody else waits for it, but its time is that of a network."""


def kind_named(name: str) -> TracedKind:
    """What an op of this name is; one that is not known takes its rank's time and nobody else's."""
    letter = _COMPUTE.get(name) or LETTERS.get(name.lower())
    if letter is not None:
        return TracedKind(name, Scope.COMPUTE, letter)
    if name in _MESSAGES:
        scope, letter = _MESSAGES[name]
        return TracedKind(name, scope, letter, True)
    scope = _OTHERS.get(name, Scope.LOCAL)
    return TracedKind(name, scope, "", scope.is_collective or name in _LOCAL_COMMUNICATION)


PARAMETERS = "params-all-gather"
"""What brings a stage's parameters before its first forward."""
