"""Memory of CUDA devices that torch does not manage."""
