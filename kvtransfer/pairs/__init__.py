"""The streams between fronts, one for each pair of nodes: dialled, served, and what crosses."""
