"""One operation per file: a checked call and the torch reference behind it.

A call is paged, strided and never waits for a device; a Triton kernel takes the reference's place
on CUDA without a change of the call. Imports torch and triton only.
"""
