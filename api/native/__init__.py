"""SGLang's native HTTP API: /generate, /tokenize and /detokenize."""
