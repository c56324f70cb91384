"""Quarantine: rules of all processes for requests that may have crashed an engine.

One request that makes a forward pass raise crashes its engine, together with all its other
requests, and it is unknown which request it was. So each of them carries a crash count. It is
computed alone, at its prefill node and at its decode node, until it is past the position of the
crash. Then it is innocent and its count is cleared. A request that is alone in an engine that
crashes is the cause.
"""

# Counted from the tokens sent: the crashed pass was for the next one, or for the one after if a
# step was launched ahead.
TRIAL_TOKENS = 4
MAX_DEATHS = 1  # crashes with which a node still accepts a request

GUILTY = "this request has ended two engines, the second one while it computed alone"
