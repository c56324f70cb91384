"""Execution of a batch on the device: the forward, its streams, graphs and warm-up."""
