"""What router and nodes alike know of a request."""
