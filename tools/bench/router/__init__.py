"""What a router costs, beside others: `python -m tools.bench.router`."""
