"""A simulated device: steps take the time of the cost model, and pages hold witnesses instead of
KV."""
