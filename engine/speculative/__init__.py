"""Speculative decoding: drafters that propose tokens, and the number of drafts that pays off."""
