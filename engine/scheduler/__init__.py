"""Choose the requests that each step computes: admission, chunked prefill, preemption,
retraction."""
