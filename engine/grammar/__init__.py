"""Guided decoding: grammar compilers, matchers and their verification."""
