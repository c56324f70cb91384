"""Resources of the GPU kernels, compiled without a GPU: `python -m tools.bench.resources`."""
