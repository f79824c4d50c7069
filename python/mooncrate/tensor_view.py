"""One tensor as bytes: which dimension counts blocks, and which dense runs a block consists of.

Everything comes from strides. A shape is only asked which dimensions have the size that the engine names.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from mooncrate.errors import AddressOverflowError, LayoutError
from mooncrate.groups import check_integer

if TYPE_CHECKING:
    from torch import Tensor

ADDRESS_SPACE: Final = 1 << 64
MAX_REGIONS_PER_TENSOR: Final = 65_536
"""A tensor whose blocks fall into more runs was described wrongly; listing them could take all memory."""


class Region(NamedTuple):
    """One run of bytes of every block: block ``b`` has ``block_bytes`` from ``base_addr + b * block_stride`` on."""

    base_addr: int
    block_stride: int
    block_bytes: int


class Dim(NamedTuple):
    """One dimension of a tensor, its stride in bytes."""

    axis: int
    size: int
    stride: int


@dataclass(frozen=True)
class TensorView:
    """The checked metadata of a tensor: it has memory, and no two elements share or interleave bytes.

    Attributes:
        name: For messages.
        shape: As torch has it.
        dims: The dimensions of more than one element, innermost in memory first. Each stride is at least the bytes that
            the dimensions before it cover. What torch says about strides of other dimensions means nothing.
        dtype: Type of an element, without ``torch.``.
        item_bytes: Bytes of an element.
        start: Address of the first byte.
        end: Address after the last byte that an element covers.
        storage_start: Address of the first byte of the storage.
        storage_end: Address after its last byte.
    """

    name: str
    shape: tuple[int, ...]
    dims: tuple[Dim, ...]
    dtype: str
    item_bytes: int
    start: int
    end: int
    storage_start: int
    storage_end: int

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> Self:
        """Reads and checks the metadata of a tensor, on any device.

        Raises:
            LayoutError: Not a strided tensor, no elements, no memory, or elements that share or interleave bytes.
            AddressOverflowError: Memory that does not fit 64-bit addresses.
        """
        if not hasattr(tensor, "untyped_storage"):
            raise LayoutError(f"{name} is a {type(tensor).__name__}, not a tensor")
        shape = tuple(tensor.shape)
        if str(tensor.layout) != "torch.strided":
            raise LayoutError(f"{name} of shape {shape} is {tensor.layout}: only strided tensors have addresses")
        if not tensor.numel():
            raise LayoutError(f"{name} of shape {shape} has 0 elements")
        storage = tensor.untyped_storage()
        start, storage_start = _unsigned(tensor.data_ptr()), _unsigned(storage.data_ptr())
        if not start:
            raise LayoutError(f"{name} of shape {shape} has no memory: its address on device {tensor.device} is 0")
        item_bytes = tensor.element_size()
        sizes_and_strides = enumerate(zip(shape, tensor.stride(), strict=True))
        dims = [Dim(axis, size, stride * item_bytes) for axis, (size, stride) in sizes_and_strides if size > 1]
        dims.sort(key=lambda dim: dim.stride)
        num_bytes = item_bytes
        for dim in dims:
            if dim.stride < num_bytes:
                raise LayoutError(
                    f"{name} of shape {shape} has elements that share or interleave bytes: dimension {dim.axis} of "
                    f"size {dim.size} has a stride of {dim.stride} bytes, and each step covers {num_bytes} bytes"
                )
            num_bytes += (dim.size - 1) * dim.stride
        end, storage_end = start + num_bytes, storage_start + storage.nbytes()
        if max(end, storage_end) > ADDRESS_SPACE:
            raise AddressOverflowError(
                f"{name} of shape {shape} covers {num_bytes} bytes at {start:#x}, in a storage up to {storage_end:#x}: "
                "that is past the last 64-bit address"
            )
        if start < storage_start or end > storage_end:
            raise LayoutError(
                f"{name} of shape {shape} covers {num_bytes} bytes at {start:#x}, outside its storage of "
                f"{storage.nbytes()} bytes at {storage_start:#x}"
            )
        dtype = str(tensor.dtype).removeprefix("torch.")
        return cls(name, shape, tuple(dims), dtype, item_bytes, start, end, storage_start, storage_end)

    def __str__(self) -> str:
        """Names the tensor with the numbers that decide."""
        stride_of = {dim.axis: dim.stride for dim in self.dims}
        strides = ", ".join(str(stride_of.get(axis, "any")) for axis in range(len(self.shape)))
        return f"{self.name} of shape {self.shape} and byte strides ({strides})"

    def regions(self, num_blocks: int, block_dim: int | None) -> list[Region]:
        """Cuts the blocks into dense runs: one region per run, in order of address.

        Args:
            num_blocks: Blocks in the tensor.
            block_dim: The dimension that counts them, if the engine says so.

        Raises:
            LayoutError: No dimension counts blocks, or several might, or blocks fall into too many runs.
        """
        block_axis = self.block_axis(num_blocks, block_dim)
        inner: list[Dim] = []
        block_stride = 0
        for dim in self.dims:
            if dim.axis != block_axis:
                inner.append(dim)
                continue
            num_parts = dim.size // num_blocks  # kernel blocks per block
            block_stride = dim.stride * num_parts
            if num_parts > 1:
                inner.append(dim._replace(size=num_parts))
        run = self.item_bytes
        num_merged = 0
        for dim in inner:
            if dim.stride != run:
                break
            run *= dim.size
            num_merged += 1
        outer = inner[num_merged:][::-1]
        num_runs = math.prod(dim.size for dim in outer)
        if num_runs > MAX_REGIONS_PER_TENSOR:
            raise LayoutError(
                f"a block of {self} falls into {num_runs} runs of {run} bytes, more than {MAX_REGIONS_PER_TENSOR}: "
                f"does dimension {block_axis} count {num_blocks} blocks?"
            )
        if num_blocks == 1:
            block_stride = run  # never used, and torch's stride of a dimension of size 1 means nothing
        steps = itertools.product(*(range(0, dim.size * dim.stride, dim.stride) for dim in outer))
        return [Region(self.start + sum(step), block_stride, run) for step in steps]

    def describe_order(self, num_blocks: int, block_dim: int | None) -> str:
        """Returns the sizes of a block's dimensions, outermost in memory first, and ``n`` for the number of blocks.

        Kernel blocks are a dimension of their own, behind that of the blocks. Where the dimensions are not in the
        order of memory, their order follows. Dimensions of size 1 order nothing and are left out.
        """
        block_axis = self.block_axis(num_blocks, block_dim)
        sizes = []
        for dim in reversed(self.dims):
            if dim.axis != block_axis:
                sizes.append(str(dim.size))
            else:
                sizes += ["n"] if dim.size == num_blocks else ["n", str(dim.size // num_blocks)]
        axes = [dim.axis for dim in reversed(self.dims)]
        text = "*".join(sizes)
        if axes == sorted(axes):
            return text
        rank_of = {axis: rank for rank, axis in enumerate(sorted(axes))}
        return f"{text}:{'.'.join(str(rank_of[axis]) for axis in axes)}"

    def block_axis(self, num_blocks: int, block_dim: int | None) -> int:
        """Returns the dimension that counts blocks, by the rule in `mooncrate.kv_caches.describe_kv_caches`.

        Raises:
            LayoutError: There is none, or there may be several.
        """
        if block_dim is not None:
            return self._said_axis(num_blocks, block_dim)
        found = [axis for axis, size in enumerate(self.shape) if size == num_blocks]
        if len(found) == 1 or (found and num_blocks == 1):
            return self._checked_outermost(found[0], num_blocks)
        if found:
            depth_of = {dim.axis: depth for depth, dim in enumerate(self.dims)}
            *_, second, outermost = sorted(found, key=depth_of.__getitem__)
            if num_blocks > 2 and depth_of[outermost] - depth_of[second] > 1:
                return self._checked_outermost(outermost, num_blocks)
            raise LayoutError(
                f"dimensions {found} of {self} all have the size of {num_blocks} blocks, and the strides do not tell "
                "which of them counts blocks: say block_dim="
            )
        storage_bytes = self.storage_end - self.storage_start
        if storage_bytes % num_blocks:
            raise LayoutError(
                f"{self} has no dimension of {num_blocks} blocks, and {num_blocks} blocks do not divide its storage of "
                f"{storage_bytes} bytes"
            )
        if not self.dims or self.dims[-1].size % num_blocks:
            raise LayoutError(
                f"{self} has no dimension of {num_blocks} blocks, and the outermost one in memory is no multiple of "
                "that: say block_dim="
            )
        return self.dims[-1].axis

    def _checked_outermost(self, axis: int, num_blocks: int) -> int:
        """Refuses an axis outside which another one may count the blocks in parts, as kernel blocks do."""
        if num_blocks > 1:
            for dim in reversed(self.dims):
                if dim.axis == axis:
                    break
                if dim.size > num_blocks and dim.size % num_blocks == 0:
                    raise LayoutError(
                        f"dimension {axis} of {self} has the size of {num_blocks} blocks, but dimension {dim.axis} "
                        f"of size {dim.size}, which lies outside it, may count them in parts: say block_dim="
                    )
        return axis

    def _said_axis(self, num_blocks: int, block_dim: int) -> int:
        """Checks what the engine says."""
        check_integer("block_dim", block_dim, least=0)
        if block_dim >= len(self.shape):
            raise LayoutError(f"{self} has {len(self.shape)} dimensions, and no dimension {block_dim} to count blocks")
        if self.shape[block_dim] % num_blocks:
            raise LayoutError(
                f"dimension {block_dim} of {self} has size {self.shape[block_dim]}, which is no multiple of "
                f"{num_blocks} blocks"
            )
        return block_dim


def _unsigned(addr: int) -> int:
    """Returns an address as it is meant: bindings that hold it in a signed integer show the upper half as negative."""
    return addr + ADDRESS_SPACE if addr < 0 else addr
