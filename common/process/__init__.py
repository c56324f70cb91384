"""Operating system resources of a process: children, IPC, memory, descriptors, stalls."""
