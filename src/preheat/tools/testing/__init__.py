"""The parts of the plugin for pytest: the state of a run, and runs on the CPU driver."""
