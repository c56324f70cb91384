"""Which requests a step computes: admission, growth, retraction, finishing."""
