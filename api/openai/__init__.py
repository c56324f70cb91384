"""OpenAI's API over the router's Generator: its words to ours and back. Decides nothing."""
