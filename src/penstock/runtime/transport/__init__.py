"""What carries messages between ranks.

    worker --send(edge, rank, payload)--> transport --> ... --> arrivals(), take(edge) --> worker

    base        what executors ask of any of them      choose      by its name as users give it
    loopback    ranks of one process              loopback_threads   each in a thread of its own
    shared_memory  between processes of one host
    gloo        between processes                 nccl               between GPUs: no tags, an order per channel
    bounded     few messages under way, in program order, as frameworks do
    delegate/   light processes that carry messages beside the computation
    conditioned link conditions injected          routed             each link by its own transport

wiring      which messages an op takes in and gives out     channel    how messages are told apart and kept in order
wire_format a payload as one flat buffer and a header       inbox      where a rank sleeps until something comes
transfer_record   a message's way, as links are measured by
"""
