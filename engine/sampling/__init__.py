"""What single rows of a batch ask of the logits, one file each."""
