"""Every mesh of four and of eight processes: a GPT, a BERT and a CLIP have the numbers of one process.

A sample that has every split; `python benchmarks/mesh/matrix.py` draws as many as wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from mesh_cases import MODELS, Job, jobs, packed, run_jobs, wrong
from mesh_runs import splits
from processes import run_ranks
from tiers import in_turn, sample

pytestmark = [pytest.mark.multiproc, pytest.mark.usefixtures("one_thread")]


# Embedding and head in two stages of one rank, whose gradients a replica sums once.
TIED = Job("bert", (1, 4, 1), "zb-v", 2, samples=30, num_steps=2, tied=True, sharding="zero1", clip_norm=0.01)
# The replicas' parts are summed in the last backward, whichever microbatch that is of.
REVERSED = Job("gpt", (2, 2, 1), "gpipe", 3, samples=14, num_steps=2, sharding="fsdp", backward="reversed")
PINNED = (TIED, replace(TIED, model="gpt", sharding="none"), REVERSED)


def as_one_process(num_processes: int, drawn: Sequence[Job]) -> None:
    outcomes = run_ranks(num_processes, run_jobs, packed(drawn))
    failed = [o for o in outcomes if o.code != 0]
    assert not failed, "\n".join(o.text[-2000:] for o in failed)
    assert wrong(drawn, [o.value for o in outcomes]) == []


@pytest.mark.slow
@settings(max_examples=sample(2, 1), phases=[Phase.generate])  # every example starts the processes again
@given(
    st.tuples(*(jobs(model, split) for k, split in enumerate(splits(4)) for model in in_turn(MODELS, k)))
)  # by day a model on each mesh, and each model on two
def test_every_model_over_every_mesh_of_four(drawn: Sequence[Job]) -> None:
    as_one_process(4, [*drawn, *PINNED])


@pytest.mark.nightly
@settings(max_examples=2, phases=[Phase.generate])
@given(st.tuples(*(st.sampled_from(MODELS).flatmap(lambda m, s=split: jobs(m, s)) for split in splits(8))))
def test_some_model_over_every_mesh_of_eight(drawn: Sequence[Job]) -> None:
    as_one_process(8, drawn)
