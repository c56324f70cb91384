"""Vectors and scores over HTTP, as OpenAI, vLLM, SGLang and Jina spell them."""
