"""The hand-off as pure state machines: no sockets, no threads, no clock but the `now` passed in.

The rules that comments name by number are in docs/design/hand-off.md.
"""
