"""Whole models on a device: made, run, proved and watched."""
