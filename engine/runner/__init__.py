"""A batch on the device: the forward, its streams, graphs and rehearsal."""
