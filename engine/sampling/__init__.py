"""Row features: per-request changes of logits and outputs, by kind."""
