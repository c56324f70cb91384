"""HTTP/1.1 on asyncio: bytes to whole requests, answers to bytes. Knows nothing of what it serves.

The parser is httptools (llhttp). Ours are the bounds, the deadlines and the order of answers.
"""
