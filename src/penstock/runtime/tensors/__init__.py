"""Tensors by themselves: trees of them, shards of them, memory that they share, seeds, and what travels between ops.

    what a stage returns --pytree--> leaves and a skeleton --message--> Payload on an Edge of the schedule's graph
                            |
                            storage: of leaves that share memory, each gets memory of its own

pytree     a nested value taken apart, and put together       dtensor   the part of a sharded tensor that lies here
storage    which tensors share memory; copies of these        rng       seeds that do not depend on the schedule
autograd   where a stage's autograd graph begins and ends      block_mask   flex attention's masks, cut by sample
message    `Edge` and `Payload`: what travels between ops     digest    a number for a batch, to compare between ranks
"""
