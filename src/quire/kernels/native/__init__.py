"""Runtime of the C kernels: build, library, memory and recordings. Each kernel's source stands beside its operation.

    all.c                        one translation unit of every operation's native.c
    parallel.h, tiles.h          threads and vectors, AMX tiles: shared by the kernels
    build.py                     compiles the shared library on first use, into the kernel cache
    library.py                   loads the library, or tells why there is none
    memory.py                    memory in huge pages
    recording.py, recording.h   recorded CPU steps

Knows no operation. Without a C compiler, a writable cache or a suitable CPU, every operation uses PyTorch.
"""
