"""The blocks of native decoders: one file per kind of token mixer or feed-forward net.

Each file has a spec, with the numbers of a configuration, and the block that computes with them.
"""
