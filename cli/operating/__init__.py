"""What commands have in common that drain programs: whom they ask, in which order, how they end."""
