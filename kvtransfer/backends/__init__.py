"""Ways to move pages from an owner's memory into a reader's, behind the contract in base.py."""
