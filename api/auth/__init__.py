"""Client identity, and each client's share of this router. Independent of prompts and nodes."""
