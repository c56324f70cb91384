"""Row features: per-request changes of logits and outputs, one file each."""
