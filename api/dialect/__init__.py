"""What the dialects of the HTTP API have in common: what is asked for, events and problems. Decides
nothing, and knows no dialect."""
