"""A report as one HTML file that needs nothing from outside. Knows nothing of what is measured."""
