"""A simulated device: steps take the modelled time, and pages hold witnesses instead of KV."""
