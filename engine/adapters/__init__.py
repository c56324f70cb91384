"""LoRA adapters: from their files to their contribution to a step's products."""
