"""Identity of processes in the cluster, and authorization of calls between them.

secret.py          the cluster secret, and a key of each role derived from it
tokens.py          signed tokens, each for one call, and the callee's proof
roles.py           the table of roles and the methods that they may call
guard.py           the callee's side, once for every method
by_token.py        authentication by tokens
program.py         the guard of a process: tokens, or the role in a certificate with mutual TLS
signing_channel.py the caller's side
exposure.py        check that a port beyond this host requires authentication
"""
