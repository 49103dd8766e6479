"""OpenMP's threads, whichever library of the process computes with them. Knows no engine."""

import ctypes
import os
from typing import Final

_LIBRARIES: Final = ("libgomp.so.1", "libiomp5.so", "libomp.dylib")
_SOFT: Final = 1  # omp_pause_soft


def end_openmp_team() -> None:
    """End the threads that OpenMP keeps for the calling thread; its next parallel work makes new ones.

    OpenMP keeps a team for each thread that ever computed, as long as that one lives, and as soon as there are more
    threads than cores all of them sleep between operations: a decode step takes twice as long then. So a thread that
    loads weights, and may not be the one that steps, leaves none behind.
    """
    if (no_load := getattr(os, "RTLD_NOLOAD", None)) is None:
        return
    for name in _LIBRARIES:
        try:
            library = ctypes.CDLL(name, mode=no_load)
        except OSError:
            continue  # nothing in this process computes with it
        library.omp_pause_resource_all(_SOFT)
