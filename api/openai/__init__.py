"""OpenAI's API: translation of requests and responses."""
