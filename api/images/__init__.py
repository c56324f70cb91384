"""Images in conversations: from the client's input to pixels in the model's size."""
