// How pages can go from one node to another, in words.

export const PATHS = {
  nvlink: "nvlink: from GPU to GPU over NVLink",
  cuda_ipc: "cuda_ipc: from GPU to GPU within a host",
  rdma: "rdma: between hosts, by the network cards alone",
  cma: "cma: out of the other process's memory on this host, by one copy of the kernel's",
  tcp: "tcp: over a socket, where nothing faster works",
};
