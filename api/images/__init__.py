"""Images in conversations: from what a client sends to pixels of the size that its model takes."""
