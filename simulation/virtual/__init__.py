"""A cluster in virtual time, in one process and one thread.

clock.py    virtual time in place of the time of the host, and a random sequence by seed
loop.py     an event loop that jumps to the next timer
network.py  gRPC's calls in memory
cluster.py  the router and its nodes
scenario.py the file that `baton sim` reads
report.py   the figures of a run
run.py      the program
"""
