"""Images: from pixels to the embeddings that a decoder takes in the place of their tokens'."""
