"""Emulated devices: real dispatch, real messages and real clocks, and ops that only take their time.

    Costs --device--> an op waits for as long as it would take
                          |
    pipeline: ranks as threads or processes, stepped and switched like one that trains
    mesh: replicas of it, and a ring that adds up their gradients by the clock

emulate, processes   one call for a whole run     ranks   what drives the ranks     plan   worked out once
gang                 ranks meet for a common op   ring    the sum over replicas
"""
