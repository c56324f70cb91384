"""The data path over a proved one-sided path, with nixl agents."""
