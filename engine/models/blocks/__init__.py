"""The blocks of native decoders: one file per kind of token mixer or feed-forward net, with its
spec."""
