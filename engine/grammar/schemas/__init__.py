"""Rewriting of clients' JSON schemas into ones that a grammar enforces completely."""
