"""The decode program: responsible for each request from submission to last token."""
