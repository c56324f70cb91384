"""Operations on tensors, one per file: a function that checks its arguments, and its torch
reference.

On CUDA, a Triton kernel replaces the reference behind the same call. Calls support pages and
strides, and do not wait for the device. Imports only torch and triton.
"""
