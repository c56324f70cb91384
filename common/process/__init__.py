"""A process and its operating system: memory, descriptors, children, stalls."""
