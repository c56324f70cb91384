"""Images: from pixels to the embeddings that replace those of image tokens."""
