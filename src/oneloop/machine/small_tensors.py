"""The bytes of many small tensors: copied at once, and compared with a copy in host memory."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from oneloop.basics.tensors import as_real

WORD = 8  # bytes
_compare_bytes = ctypes.CDLL(None).memcmp  # of the C library: 0 if they are equal
_compare_bytes.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


class SmallTensors:
    """The bytes of dense tensors, where they are now.

    Args:
        device: on which all of them are.

    Attributes:
        lengths: of each of them, in bytes.
    """

    def __init__(self, device: torch.device) -> None:
        self.lengths: tuple[int, ...] = ()
        self._device = device
        self._memory: list[tuple[int, int]] = []  # of each tensor: address, length
        self._views: list[Tensor] = []
        self._places: list[tuple[int, int, int]] = []  # of each view: address, begin, length
        self._spare: Tensor | None = None

    def look_at(self, tensors: Sequence[Tensor]) -> None:
        """Make views of their bytes, unless those of the last time still serve."""
        memory = [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]
        if memory == self._memory:
            return
        self._memory = memory
        self._views = [_bytes_of(tensor.detach()) for tensor in tensors]
        self._places = []
        self._spare = None
        self.lengths = tuple(map(len, self._views))
        begin = 0
        for view in self._views:
            self._places.append((view.data_ptr(), begin, len(view)))
            begin += len(view)

    def copied(self) -> Tensor:
        """Return a copy of all bytes, and zeros up to a whole word, as int64."""
        size = sum(self.lengths)
        words = self._spare
        self._spare = None
        if words is None:
            words = torch.zeros(-(-size // WORD), dtype=torch.int64, device=self._device)
        if self._device.type == "cpu":
            copy = words.data_ptr()  # torch.cat takes four times as long
            for address, begin, length in self._places:
                ctypes.memmove(copy + begin, address, length)
        elif self._views:
            torch.cat(self._views, out=words.view(torch.uint8)[:size])
        return words

    def reuse(self, words: Tensor) -> None:
        """Overwrite a copy, which nothing else holds, with the next one."""
        self._spare = words

    def equal(self, words: Tensor) -> bool:
        """Return whether all bytes in host memory are those of a copy."""
        copy = words.data_ptr()
        for address, begin, length in self._places:  # the views keep this memory
            if _compare_bytes(address, copy + begin, length):
                return False
        return True


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a dense tensor in the order of memory, 1-dim, as a view."""
    flat = tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return as_real(flat).view(-1).view(torch.uint8)
