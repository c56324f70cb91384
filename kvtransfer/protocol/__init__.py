"""The hand-off protocol as pure state machines: no sockets, no threads, and time only as the
argument `now`. The transfer thread runs them.

Comments refer to the numbered rules in docs/design/hand-off.md.
"""
