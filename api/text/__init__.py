"""Tokenisation and detokenisation for the served model."""
