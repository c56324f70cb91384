"""The transfer thread of an engine process, and the consumer and producer sides that it runs."""
