"""Operations compiled for this CPU, if there is a compiler: C++ code, and the calls into it.

Each replaces a torch reference in `kernels`. The reference's file checks arguments, defines the
operation, and asks `kernels.device` whether the compiled one is available.
"""
