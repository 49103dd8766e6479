"""How much memory the stores of one engine may hold together.

Knows no backend. Invariant: what is taken and not given back never exceeds `total`.
"""

import os
import threading
import weakref
from collections.abc import Callable

from hetsplit.errors import CapacityError


class KvBudget:
    """Bytes that all stores of one engine may hold together. Safe to use from any thread."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0
        self._lock = threading.Lock()

    def take(self, asked: int, what: str) -> None:
        """Raises `CapacityError` naming the bytes asked for and those that are free."""
        with self._lock:
            if asked > self.total - self.used:
                free = self.total - self.used
                raise CapacityError(f"{what} needs {asked:,} bytes, {free:,} of {self.total:,} are free")
            self.used += asked

    def lend(self, holder: object, asked: int, what: str) -> Callable[[], object]:
        """`take`, until the result is called, which may be repeated, or `holder` is dropped."""
        self.take(asked, what)
        give_back = weakref.finalize(holder, self.give, asked)
        give_back.atexit = False
        return give_back

    def give(self, nbytes: int) -> None:
        with self._lock:
            self.used -= nbytes


def physical_bytes() -> int:
    """Memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
