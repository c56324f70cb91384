"""The stub node with a thread that never ends, which delays the end of the interpreter. The node
has a second for its end."""

import runpy
import threading

from node.frontend import frontend

frontend._END_S = 1.0
threading.Thread(target=threading.Event().wait).start()
runpy.run_module("tests.support.processes.stub_node", run_name="__main__")
