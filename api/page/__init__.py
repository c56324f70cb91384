"""The page at / of the router: static files, made by no build step, using nothing from outside."""
