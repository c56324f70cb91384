"""LoRA adapters: from their files to what they add to a step's products."""
