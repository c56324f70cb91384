"""The hand-off as pure state machines: no sockets, no threads, no clock but the `now` passed in."""
