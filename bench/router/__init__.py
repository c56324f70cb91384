"""What a router costs, beside others: `python -m bench.router`."""
