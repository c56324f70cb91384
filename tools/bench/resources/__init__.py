"""What the GPU's kernels take, compiled without one: `python -m tools.bench.resources`."""
