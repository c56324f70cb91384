"""What stands between the matrix products of every model."""
