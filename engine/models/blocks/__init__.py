"""The blocks of native decoders, one file per mixer and feed-forward net.

Each file has the spec (numbers of a configuration) and the block that computes it.
"""
