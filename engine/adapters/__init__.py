"""LoRA adapters: loading, host memory, device slots, and their part in a step."""
