"""What adapters add to products."""
