"""The decode node process: responsible for each request from submission to the last token."""
