"""The data path where a one-sided path has been proved: agents of nixl."""
