"""An engine's module that is never done with its imports."""

import time

print("importing", flush=True)
time.sleep(600)
