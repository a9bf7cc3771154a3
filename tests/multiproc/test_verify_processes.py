"""`pipe.verify` between processes: each of forty mistakes is found and named alike by both, over meshes too.

By day that is a third of them: tests/unit/test_verify.py has all, in one process.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import penstock as ps
from contract_mistakes import MISTAKES, D, Does, batch, piped, row
from fuzz_cases import Case
from fuzz_runs import between_processes
from fuzz_verified import keeps_the_contract, run_verified
from processes import run_ranks, run_ranks_to_end
from tiers import chosen, others_nightly, sample

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]


def find_all(rank: int) -> dict[str, list[int] | str]:
    warnings.simplefilter("ignore")
    found: dict[str, list[int] | str] = {}
    for name, (_, made) in chosen(MISTAKES, list(MISTAKES)[::3]).items():
        torch.manual_seed(0)
        pipe, inputs, targets = made(2)
        try:
            found[name] = str(pipe.verify(inputs, targets))
        except ps.VerifyError as error:
            found[name] = [each.sentence for each in error.verification.comparisons if each.outcome == "differs"]
        pipe.close()
    return found


def test_every_mistake_is_found_by_both_processes() -> None:
    outcomes = run_ranks_to_end(2, find_all)
    assert outcomes[0].value == outcomes[1].value
    wrong = {name: found for name, found in outcomes[0].value.items() if found[:1] != [MISTAKES[name][0]]}
    assert not wrong


def sums(rank: int) -> str:
    pipe = ps.Pipeline(row(ranks=2), ps.build("1f1b", 2, 4), loss_fn=lambda out, y: (out - y).square().sum())
    with pytest.raises(ps.VerifyError) as raised:
        pipe.verify(*batch())
    return str(raised.value)


def test_what_the_last_rank_says_of_the_loss_is_said_by_all() -> None:
    for outcome in run_ranks(2, sums):
        assert "It looks like a sum" in outcome.value
        assert "adds_up = True" in outcome.value


def replicas_differ(rank: int) -> str:
    torch.manual_seed(0)
    model = row(ranks=1)
    options = {
        "loss_fn": nn.MSELoss(),
        "optimizer": torch.optim.SGD,
        "mesh": init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp")),
    }
    pipe = ps.Pipeline(model, ps.build("1f1b", 1, 4), **options)
    assert pipe.verify(*batch()).holds
    if rank == 1:
        model[0].weight.data.mul_(1.5)  # which torch does not count
    try:
        pipe.verify(*batch())
    except ps.VerifyError as error:
        return str(error.verification.comparisons[0].sentence)
    return "nothing"


def test_replicas_that_differ_break_sentence_4() -> None:
    outcomes = run_ranks(2, replicas_differ)
    assert [o.value for o in outcomes] == ["4", "4"], outcomes[0].text


def functions_share(rank: int) -> list[str]:
    """Functions of stages that take one module from outside of them: each process would train a copy of its own."""
    shared, x, said = nn.Linear(6, 6), torch.randn(8, 6), []
    for tied in ([], [("0.weight", "1.weight"), ("0.bias", "1.bias")]):
        options = ps.ParallelOptions(tied=tied)
        stages = [lambda: shared, lambda: shared]
        with ps.Pipeline(stages, ps.build("1f1b", 2, 4), loss_fn=nn.MSELoss(), parallel=options) as pipe:
            try:
                said.append(str(pipe.verify(x, x)))
            except ps.VerifyError as error:
                said.append(str(error))
    return said


def test_functions_that_share_a_module_without_saying_so_break_sentence_5() -> None:
    for outcome in run_ranks_to_end(2, functions_share):
        unsaid, tied = outcome.value
        assert "functions of stages 0 and 1 share 0." in unsaid
        assert "functions of stages" not in tied


class Chain(nn.Module):
    """A model that is traced."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def uses_a_parameter_of_another_process(rank: int) -> list[str]:
    torch.manual_seed(0)
    first = nn.Linear(D, D)
    uses = Does(lambda layer, x: first(x) * layer.weight)
    wide = nn.Sequential(nn.Linear(D, 20 * D), nn.Linear(20 * D, D))
    found = []
    for model in ([nn.Sequential(first, nn.Tanh()), uses], Chain(first, wide, nn.Tanh(), uses)):
        try:
            piped(model, 2).verify(*batch())
        except ps.VerifyError as error:
            found.append(str([c.sentence for c in error.verification.comparisons if c.outcome == "differs"]))
    return found


def test_a_parameter_of_a_stage_in_another_process_breaks_sentence_5() -> None:
    outcomes = run_ranks(2, uses_a_parameter_of_another_process)
    for outcome in outcomes:
        assert len(outcome.value) == 2
        assert all("5" in found for found in outcome.value), outcome.value


SHAPES = [(2, 1, 1), (2, 2, 1), (1, 2, 2), (2, 1, 2)]


@pytest.mark.parametrize(("pp", "dp", "tp"), others_nightly(SHAPES, [(2, 2, 1)]))
def test_programs_that_keep_the_contract_over_a_mesh(pp: int, dp: int, tp: int) -> None:
    cases: list[Case] = []
    number = 500_000
    while len(cases) < sample(15, 1):
        number += 1
        case = keeps_the_contract(number, (pp, dp, tp))
        if case is not None:
            cases.append(case)
    told = between_processes(pp * dp * tp, cases, run_verified)
    assert not [(case, outcome) for case, outcome in zip(cases, told, strict=True) if outcome.kind not in KINDS]


KINDS = ("same", "invalid", "refused")
