"""The Anthropic Messages API, translated to the same parts as the OpenAI API."""
