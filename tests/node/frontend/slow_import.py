"""An engine's module whose import never ends."""

import sys
import time

sys.stdout.write("importing\n")  # at once, because other processes write to the same pipe
sys.stdout.flush()
time.sleep(600)
