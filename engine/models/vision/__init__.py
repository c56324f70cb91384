"""Image encoders: from pixels to the embeddings of image tokens."""
