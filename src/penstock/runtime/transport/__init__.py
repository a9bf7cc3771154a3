"""What carries messages between ranks.

    worker --send(edge, rank, payload)--> transport --> ... --> arrivals(), take(edge) --> worker

    base        what executors ask of any of them      choose      by its name as users give it

what carries
    loopback    between ranks of one process      shared_memory   between processes of one host
    gloo        between processes                 nccl            its lines between GPUs: an order per channel
    delegate/   light processes that carry messages beside the computation
    routed      each link by its own transport

what stands in front of any of them (base.TransportLayer)
    conditioned link conditions injected          bounded         few messages under way, as frameworks do
                                                  acknowledgements  which have arrived, where gloo carries


wiring      which messages an op takes in and gives out     channel    how messages are told apart and kept in order
wire_format a payload as one flat buffer and a header       inbox      where a rank sleeps until something comes
transfer_record   a message's way, as links are measured by
"""
