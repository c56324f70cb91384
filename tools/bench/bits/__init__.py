"""Checks that responses have the same bits whatever happens around them, in whole systems."""
