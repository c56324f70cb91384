"""The pair streams between frontends, one for each two nodes: dialer, service and wire codec."""
