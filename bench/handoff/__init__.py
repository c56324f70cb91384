"""What a hand-off costs: `python -m bench.handoff`, in parts."""
