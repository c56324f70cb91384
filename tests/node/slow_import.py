"""An engine's module that is never done with its imports."""

import sys
import time

sys.stdout.write("importing\n")  # at once, because others write to the same pipe
sys.stdout.flush()
time.sleep(600)
