"""Keys and values into their pages, and whole pages from one memory to another."""
