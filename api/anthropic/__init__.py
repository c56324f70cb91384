"""Anthropic's form of a chat, on the same core as OpenAI's."""
