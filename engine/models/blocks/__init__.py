"""The blocks of native decoders, one file per mixer and feed-forward net: what one is, as numbers
of a configuration, beside what computes it."""
