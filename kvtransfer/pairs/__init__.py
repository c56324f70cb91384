"""The pair streams between fronts, one for each pair of nodes: dialer, service and wire codec."""
