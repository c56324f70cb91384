"""How many nodes of each role a cluster should have, from what its nodes say of themselves."""
