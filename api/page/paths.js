// Meaning of each data path between nodes.

export const PATHS = {
  nvlink: "nvlink: copy between GPUs over NVLink",
  cuda_ipc: "cuda_ipc: copy between GPUs of one host",
  rdma: "rdma: read between hosts by their network cards",
  cma: "cma: copy from another process of the same host by the kernel (cross-memory attach)",
  tcp: "tcp: socket, used if no faster path works",
};
