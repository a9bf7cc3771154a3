"""Emulated devices: real dispatch, real messages and real clocks, and ops that only take their time.

    Costs --device--> an op waits for as long as it would take
                          |
    pipeline: ranks as threads or processes, stepped and switched like one that trains
    mesh: replicas of it, and a ring that adds up their gradients by the clock

emulated_run, processes   one call for a whole run     ranks   what drives the ranks     backend   what an op takes
gang                      ranks meet for a common op   ring    the sum over replicas

What a rank decides, how its messages travel and how it is measured is the runtime's own (`execute/`, `transport/`).
"""
