"""Measured processes on a GPU, and their loads."""
