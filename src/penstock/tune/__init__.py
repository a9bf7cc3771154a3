"""The tuner: measures a model on the device at hand, simulates every way to train it, ranks them, runs the best.

session.tune(settings)   costs -> search -> verify       settings, session, verify
costs                    measured: meter, job, layers, transfer       given: given_costs
search                   space x costs -> ranked         space, search, programs, towers, predict, memory
"""
