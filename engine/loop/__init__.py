"""The overlap loop, and who watches that it moves."""
