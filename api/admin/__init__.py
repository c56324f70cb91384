"""What operators see, and have done: nodes, requests under way, plans, adapters, all engines."""
