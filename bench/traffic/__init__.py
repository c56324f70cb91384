"""What is sent to a server, when, over which connections, and what came of each request."""
