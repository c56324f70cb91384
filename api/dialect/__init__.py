"""Shared parts of the HTTP APIs of OpenAI, Anthropic and SGLang: fields, events and errors."""
