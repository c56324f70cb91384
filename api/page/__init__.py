"""The status page at / of the router: static files without a build step or external resources."""
