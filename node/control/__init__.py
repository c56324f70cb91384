"""Reports of an engine process to its frontend, and operators' commands, for every role."""
