"""A device that computes nothing: steps take the time of the cost model, KV is a witness."""
