"""Rewriting of JSON schemas so that a grammar enforces them completely."""
