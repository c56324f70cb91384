"""What becomes of a request that an engine may have died of: the rules that all programs keep to.

One request that makes a forward raise takes its engine down, and all others of that engine with it.
Nobody knows then which of them it was. So each of them carries on that it was there, and computes
alone, at its prefill node and at its decode node, until it has got past the place of the death:
then it was innocent, and nothing is held against it. One that is alone in an engine that dies is
what the engine died of.
"""

# From the tokens that had been told: the forward that died was for the next one of them, or, with
# a step launched ahead, for the one after.
TRIAL_TOKENS = 4
MAX_DEATHS = 1  # of engines, that a node takes a request with

GUILTY = "this request has ended two engines, the second one while it computed alone"
