"""The encode node process: encodes images for prefill nodes, which read the embeddings."""
