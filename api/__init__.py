"""What clients speak to: gRPC, the OpenAI routes over HTTP, the page, reports."""
