"""The router process: its construction and its worker processes."""
