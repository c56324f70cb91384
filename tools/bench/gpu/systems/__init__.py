"""Processes under measurement, and their loads."""
