"""The choice of the requests that a step computes: admission, growth, retraction, finishing."""
