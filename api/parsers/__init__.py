"""What a model's text is made of: what it thinks, what it says, which tools it calls."""
