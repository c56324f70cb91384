"""Low-rank products that adapters add to the model's products."""
