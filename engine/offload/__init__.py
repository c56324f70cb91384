"""Below the prefix cache: what it forgets is kept in host memory, and brought back from there."""
