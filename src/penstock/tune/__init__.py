"""The tuner: measures a model on the device at hand, simulates every way to train it, ranks them, runs the best.

session.tune(asked)      measure -> search -> verify          meter, search, verify
search                   space x profile -> ranked            space, predict, memory
profile                  what layers and messages cost        measured: layers, transfer; estimate, costs_file
"""
