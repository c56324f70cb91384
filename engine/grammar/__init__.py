"""Guided decoding: compilation of grammars, matchers of responses, and verification of their
cost."""
