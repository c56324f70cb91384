"""Traffic to a server: requests, arrival times, connections, and the outcome of each request."""
