"""A cluster in virtual time, in one process and one thread.

clock.py    virtual time instead of the host's, and random numbers by seed
loop.py     an event loop that jumps to the next timer
network.py  gRPC calls in memory
cluster.py  the router and its nodes
scenario.py the file that `baton sim` reads
report.py   the figures of a run
run.py      a whole run
"""
