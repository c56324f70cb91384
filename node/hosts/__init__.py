"""Ranks of a node on several hosts.

relay.py     runs on the first host, between rank 0 and the rank hosts
rank_host.py `baton rank-host`: runs the ranks of another host
packets.py   the sockets between ranks and these processes
"""
