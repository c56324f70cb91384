"""Operations, one per file: a call that checks its arguments, and its torch reference.

Calls are paged, strided and never wait for a device. On CUDA a Triton kernel replaces the reference
behind the same call. Imports torch and triton only.
"""
