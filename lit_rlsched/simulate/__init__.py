"""The run's own round loop on a virtual clock: without a model, without torch."""
