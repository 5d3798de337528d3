"""The command line `lit-rlsched`."""
