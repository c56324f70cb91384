"""Programs beside the one that measures, and what is asked of them."""
