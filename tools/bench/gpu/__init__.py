"""Measurements on one GPU: `python -m tools.bench.gpu`.

operation.py    `Op`: a call, its exact result and its floor. How it is checked, timed and compared
operations/     the operations of kernels, and comparisons of bits
setting.py      device, clock, ceilings of the machine, and the dry mode
parts/          the parts of a run. Each yields rows. `machine` measures the ceilings
model/          whole models with random weights, and their engine
systems/        processes and loads of the parts `transfer` and `serving`
process.py      runs each part in a process of its own, and keeps its rows
goals.py        goals of a run
"""
