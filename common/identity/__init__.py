"""Identity of processes in the cluster, and authorization of calls between them.

  secret.py   the cluster secret, and a key of each role derived from it
  tokens.py   signed tokens, each for one call, and the callee's proof
  guard.py    the callee's side, once for every method: roles and the methods that they may call
  program.py  the guard of a process: tokens, or the role in a certificate with mutual TLS

The caller's side is in common/rpc/channels.py.
"""
