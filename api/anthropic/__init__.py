"""The Anthropic Messages API, on the same core as the OpenAI API."""
