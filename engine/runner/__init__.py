"""Execution of a batch on the device: forwards, streams, CUDA graphs and warmup."""
