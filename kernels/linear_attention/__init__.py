"""Linear attention: layers with a recurrent state of fixed size instead of keys and values."""
