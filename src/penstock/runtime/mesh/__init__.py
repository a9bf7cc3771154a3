"""Which processes there are, what each is for, and the few values that all must share.

              pp (stages) -->
    dp   | rank 0 | rank 1 | rank 2 |      a row is a replica of the pipeline: `Peers` of a step
     |   | rank 0 | rank 1 | rank 2 |      a column holds the same stages: its gradients are added up
     v                                     (tp: each cell is several processes, with a shard of each layer)

process_mesh   where this process lies       peers         sums, gathers and barriers among ranks, with deadlines
device_mesh    groups for nodes on a mesh    groups        groups of some ranks, made by all in one order
probe          what links take by themselves consistency   whether all ranks were asked the same
interfaces     the addresses of this host    failure       what a process group's errors mean
weak_group     a group that is used and not kept alive
clock          how far the clocks of two hosts are apart
"""
