"""Embeddings and scores over HTTP, compatible with OpenAI, vLLM, SGLang and Jina."""
