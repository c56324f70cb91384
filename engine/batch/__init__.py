"""What a step is about: requests, the table of their rows, a batch and its tensors."""
