"""Training and evaluation of the demo model."""
