"""Reports of an engine process to its front, and operators' commands, independent of the role."""
