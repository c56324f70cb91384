"""Reports as self-contained HTML files. Independent of the measurements."""
