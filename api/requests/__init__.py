"""Client requests: validation, admission, recording and responses."""
