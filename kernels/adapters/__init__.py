"""Low-rank products (LoRA) that adapters add to the model's products."""
