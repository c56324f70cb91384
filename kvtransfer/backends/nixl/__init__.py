"""The one-sided data paths (cma, cuda_ipc, nvlink, rdma), which use NIXL agents."""
