"""The HTTP API that is neither OpenAI's nor Anthropic's: /generate, /tokenize and /detokenize."""
