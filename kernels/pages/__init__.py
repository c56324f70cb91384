"""Writing of keys and values to their pages, and copies of whole pages between memories."""
