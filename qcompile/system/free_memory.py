"""How much memory this machine has left."""

from __future__ import annotations

import os


def available_memory() -> int:
    """Bytes that can be allocated without swapping (MemAvailable)."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
