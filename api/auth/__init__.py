"""Authentication of clients and operators, rate limits, and fair sharing of the router's slots."""
