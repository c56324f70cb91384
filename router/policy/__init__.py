"""Routing policies, which choose the nodes of a request. They open no connections."""
