"""Tokenization and detokenization for the served model."""
