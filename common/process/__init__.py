"""A program and its operating system: memory, descriptors, children, standing still."""
