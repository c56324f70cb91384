"""The transfer thread of an engine process, with what it runs at either end of a pair."""
