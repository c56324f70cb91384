"""What a hand-off costs: `python -m tools.bench.handoff`, in parts."""
