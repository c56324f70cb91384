"""Who a program of the cluster is, and who may ask it for what.

secret.py          the cluster secret, and a key of each role derived from it
tokens.py          what a caller shows and a callee answers: a signed token of one call
roles.py           the one table: which role may call which method
guard.py           the callee's side, once for every method
signing_channel.py the caller's side
certificates.py    the role in a certificate, where TLS takes the secret's place
operator.py        what an operator shows over HTTP
exposure.py        what may listen beyond this host
"""
