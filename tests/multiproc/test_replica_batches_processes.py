"""Replicas give their own parts of a batch, and ranks that need none give None: all is as with whole batches."""

from __future__ import annotations

import pytest
import torch

from processes import run_ranks_to_end
from replica_batch_runs import GivesLoss, compared, refused, uneven, without_targets
from tiers import NIGHTLY

pytestmark = [pytest.mark.multiproc, pytest.mark.usefixtures("one_thread")]


@pytest.mark.slow
def test_losses_gradients_and_outputs_are_those_of_whole_batches() -> None:
    cases = [("1f1b", 4, 1), ("zb-v", 2, 2), ("chimera", 2, 2), ("1f1b", 1, 4)]
    cases = cases if NIGHTLY else cases[1:3]
    outcomes = run_ranks_to_end(4, compared, cases)
    assert [o.value for o in outcomes] == [[]] * 4


def test_one_process_s_mistake_is_an_error_in_all_and_the_next_step_works() -> None:
    outcomes = run_ranks_to_end(4, refused)
    said = outcomes[0].value
    assert all(o.value == said for o in outcomes)
    wanted = [
        ["process 1 has the first stage of replica 1", "given no inputs"],
        ["process 3 has the last stage of replica 1", "given no targets"],
        ["replica 0", "1, 1, 1 samples", "3, 3, 2 targets"],
        ["replica 0", "2, 2, 2, 2 samples", "2, 2, 2, 1 targets"],
        ["process 0 cut its batch into 2 microbatches", "process 3 into 4"],
        ["process 0", "targets hold no tensor"],
        ["True"],
    ]
    for text, words in zip(said, wanted, strict=True):
        for word in words:
            assert word in text, said


def test_a_small_batch_of_one_replica_alone_was_an_error() -> None:
    """All cut theirs into as few microbatches: `process 1 cut its batch into 3 microbatches and process 0 into 4`."""
    for outcome in run_ranks_to_end(2, uneven):
        evaluated, trained, gradients = outcome.value
        assert max(evaluated, trained, *map(float, gradients)) < 1e-6


def test_shares_of_a_model_s_own_loss_are_added_up_whole_and_in_parts() -> None:
    """Of whole batches they were weighed by samples, as there are no targets."""
    torch.manual_seed(0)
    model, inputs = GivesLoss(6, 6), torch.randn(16, 6, generator=torch.Generator().manual_seed(1))
    want = model(inputs)["loss"]
    want.backward()
    for outcome in run_ranks_to_end(2, without_targets):
        whole, said_of_whole, parts, said_of_parts = outcome.value
        for loss, gradients in (whole, parts):
            assert loss == pytest.approx(want.item())
            for gradient, parameter in zip(gradients, model.parameters(), strict=True):
                torch.testing.assert_close(gradient, parameter.grad)
        assert "no targets were given" in said_of_whole
        assert "has the last stage of replica 0 and was given no targets" in said_of_parts
