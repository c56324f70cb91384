"""OpenAI's API over the router's Generator: a translation of requests and responses."""
