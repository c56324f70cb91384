"""Reports of an engine process to its frontend, and commands of operators, for every role."""
