"""Carries messages between ranks.

    worker --send(edge, rank, payload)--> transport --> ... --> arrivals(), take(edge) --> worker

    base        what executors need of any transport, and a message's times
    choose      by its name, as users give it

transports
    loopback    between ranks of one process      shared_memory   between processes of one host
    gloo        between processes                 nccl            its lines between GPUs: an order per channel
    delegate/   light processes that carry messages beside the computation
    routed      each link by its own transport

in front of any of them
    link_conditions   late, lossy and dead links, injected; with a bound on messages under way, as in other frameworks

what goes on when a network dies
    heartbeats      who can be reached by which interface, and small values that no lost link holds up
    failover        all groups of a process change over to another interface
    repeat          what was under way is begun anew by all processes

wiring       which messages an op receives and sends      channel      messages told apart, and kept in order
inbox        what came in, and where a rank sleeps        wire_format  a payload as one flat buffer, and its spec
rank_memory  what processes of a host share
"""
