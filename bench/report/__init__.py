"""A report as one self-contained HTML file. Independent of the measurements."""
