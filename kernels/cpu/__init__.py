"""Operations compiled for the CPU at hand, where it has a compiler: C++ and the calls into it.

Each takes the place of a torch reference of its own file in `kernels`, which checks arguments, says
what is computed and asks `kernels.device` whether this is there.
"""
