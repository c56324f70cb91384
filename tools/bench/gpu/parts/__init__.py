"""The parts of `python -m tools.bench.gpu`, one module each, in execution order."""

from tools.bench.gpu.process import Part

PARTS = (
    Part("machine", "ceilings: bandwidth, matrix products, launches", 40),
    Part("compile", "kernels for all that follows, in parallel", 35),
    Part("attention", "decode and extend attention", 60),
    Part("kernels", "the other kernels, linear layers and experts", 60),
    Part("bits", "whether bits depend on the batch", 60),
    Part("decode", "whole decode steps", 100),
    Part("prefill", "whole prompts", 40),
    Part("layout", "page envelopes against one pool per layer", 30),
    Part("transfer", "reads of pages between two processes", 40),
    Part("serving", "whole systems, and transformers", 140),
    Part("tuning", "launch parameters of the attention kernels", 40),
)
FIRST = PARTS[0].name  # always runs, because shares need its ceilings
