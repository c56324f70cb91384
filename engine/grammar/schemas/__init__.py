"""JSON schemas as clients write them, made into ones that a grammar keeps to entirely."""
