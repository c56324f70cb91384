"""Tokenization, detokenization, chat templates and stop strings."""
