"""Operations compiled for this CPU, if it has a compiler: C++ code, and the calls into it.

Each replaces a torch reference in `kernels`. The reference's file checks arguments, defines the
result, and asks `kernels.device` whether the compiled operation is available.
"""
