"""Who asks, and how much of this router is theirs. Knows nothing of prompts and nodes."""
