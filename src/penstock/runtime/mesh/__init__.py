"""Which processes there are, what each is for, and the few values that all must share.

              pp (stages) -->
    dp   | rank 0 | rank 1 | rank 2 |      a row is a replica of the pipeline: `Peers` of a step
     |   | rank 0 | rank 1 | rank 2 |      a column holds the same stages: its gradients are added up
     v                                     (tp: each cell is several processes, with a shard of each layer)

process_mesh  where this process lies, and the mesh's nodes    peers   sums, gathers, barriers, with deadlines
probe         what links take by themselves, and how far the clocks of two hosts are apart
interfaces    the addresses of this host
collective    the collective ops of a group, and what its errors mean
"""
