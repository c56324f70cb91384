"""The transfer thread of an engine process, and the reader and owner sides that it runs."""
