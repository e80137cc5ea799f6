"""Memory of a GPU that can be given back while its addresses stay, through the driver's virtual memory management.

CUDA graphs and prepared launches hold addresses. So when the memory is taken again, they are valid as they are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable

# Constants of the driver's API.
_PINNED = 1
_DEVICE = 1
_READ_WRITE = 3
_SMALLEST_GRANULARITY = 0


class _Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("metadata", ctypes.c_void_p),
        ("flags", ctypes.c_char * 8),
    ]


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


class MappedMemory:
    """Ranges of addresses on the GPU `device` (its ordinal), by their first address.

    check: raises the error of a driver call's return code (Driver.check). Its context must be current in each call.
    """

    def __init__(self, library: ctypes.CDLL, device: int, check: Callable[[int, str], None]) -> None:
        self._library, self._check = library, check
        location = _Location(_DEVICE, device)
        self._properties = _Properties(type=_PINNED, location=location)
        self._access = _Access(location, _READ_WRITE)
        self._sizes: dict[int, int] = {}
        self._mapped: set[int] = set()

    def __contains__(self, address: int) -> bool:
        return address in self._sizes

    def reserve(self, size: int, what: str) -> int:
        """The address of at least `size` bytes, which have memory. Raises ResourceError if there is none for `what`."""
        size = self._rounded(size)
        address, any_place = ctypes.c_uint64(), ctypes.c_uint64(0)
        given = ctypes.byref(address), ctypes.c_size_t(size), ctypes.c_size_t(0), any_place, ctypes.c_uint64(0)
        self._check(self._library.cuMemAddressReserve(*given), what)
        self._sizes[address.value] = size
        try:
            self.map(address.value, what)
        except BaseException:
            self.free(address.value)
            raise
        return address.value

    def size(self, address: int) -> int:
        """Bytes of the range at an address."""
        return self._sizes[address]

    def lacking(self, addresses: Iterable[int]) -> int:
        """Bytes of those of the ranges at these addresses that have no memory."""
        return sum(self._sizes[address] for address in addresses if address not in self._mapped)

    def map(self, address: int, what: str) -> bool:
        """Take memory for the range at an address; its content is undefined. Returns whether it had none.

        Raises ResourceError if there is none for `what`.
        """
        if address in self._mapped:
            return False
        library, handle, size = self._library, ctypes.c_uint64(), ctypes.c_size_t(self._sizes[address])
        first, none = ctypes.c_uint64(address), ctypes.c_uint64(0)
        made = library.cuMemCreate(ctypes.byref(handle), size, ctypes.byref(self._properties), none)
        self._check(made, what)
        code = library.cuMemMap(first, size, ctypes.c_size_t(0), handle, none)
        self._check(library.cuMemRelease(handle), what)  # the memory lives as long as it is mapped
        self._check(code, what)
        self._mapped.add(address)
        allowed = library.cuMemSetAccess(first, size, ctypes.byref(self._access), ctypes.c_size_t(1))
        if allowed:
            self.unmap(address)
        self._check(allowed, what)
        return True

    def unmap(self, address: int) -> None:
        """Give the memory of the range at an address back, if it has some. Nothing that uses it may run."""
        if address in self._mapped:
            size = ctypes.c_size_t(self._sizes[address])
            self._check(self._library.cuMemUnmap(ctypes.c_uint64(address), size), "release")
            self._mapped.remove(address)

    def free(self, address: int) -> None:
        """Give the memory and the addresses of a range back."""
        self.unmap(address)
        size = ctypes.c_size_t(self._sizes.pop(address))
        self._check(self._library.cuMemAddressFree(ctypes.c_uint64(address), size), "free")

    def _rounded(self, size: int) -> int:
        """`size` rounded up to what can be mapped."""
        unit, least = ctypes.c_size_t(), ctypes.c_int(_SMALLEST_GRANULARITY)
        code = self._library.cuMemGetAllocationGranularity(ctypes.byref(unit), ctypes.byref(self._properties), least)
        self._check(code, "granularity")
        return -(-max(size, 1) // unit.value) * unit.value
