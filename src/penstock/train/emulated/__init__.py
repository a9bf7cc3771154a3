"""Training runs on emulated devices: real dispatch, messages and clocks; ops that only take their time."""
