"""Who guesses what an answer's next tokens are, and how many guesses pay."""
