"""Text to tokens and back, as the served model has it."""
