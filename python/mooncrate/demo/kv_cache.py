"""The paged KV cache of an engine in torch tensors: filled with what the workload says, and compared with it."""

from dataclasses import dataclass

import torch

from mooncrate.demo.workload import PERIOD, Workload

UNTOUCHED = 0xEE
"""Fills blocks that do not belong to the prompt."""


@dataclass(frozen=True)
class WrongByte:
    """The first byte that is not what it should be, and how many there are in its layer.

    ``chunk`` is None for a block outside the prompt, which nobody should have written to.
    """

    chunk: int | None
    block_id: int
    layer: int
    offset: int
    expected: int
    got: int
    num_wrong: int

    def __str__(self) -> str:
        """Says where and what in one line."""
        owner = "a block outside the prompt" if self.chunk is None else f"chunk {self.chunk}"
        return (
            f"wrong byte in {owner}, layer {self.layer}, offset {self.offset} (block {self.block_id}): "
            f"expected {self.expected}, got {self.got}; {self.num_wrong} wrong in this layer"
        )


class PagedKVCache:
    """One tensor per layer, ``(num_blocks, 2, block_size, num_heads, head_dim)``, of bfloat16."""

    def __init__(self, workload: Workload, block_ids: list[int], device: str) -> None:
        """Allocates the tensors, every byte untouched.

        Args:
            workload: Shape and expected content.
            block_ids: Where this engine keeps the chunks of the prompt.
            device: A torch device; ``auto`` is CUDA where there is one, else CPU.
        """
        self.device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
        self._workload = workload
        self._block_ids = block_ids
        shape = (workload.num_blocks, 2, workload.block_size, workload.num_heads, workload.head_dim)
        self.layers = [torch.empty(shape, dtype=torch.bfloat16, device=self.device) for _ in range(workload.num_layers)]
        for layer in range(workload.num_layers):
            self._bytes(layer).fill_(UNTOUCHED)
        self._index = torch.tensor(block_ids, device=self.device)

    def fill(self) -> None:
        """Writes the patterns into the blocks of the prompt."""
        for layer in range(self._workload.num_layers):
            self._bytes(layer)[self._index] = self._expected(layer)
        self.synchronize()

    def flip_byte(self) -> None:
        """Spoils one byte in the middle of the prompt, for the test that it is noticed."""
        workload = self._workload
        block_id = self._block_ids[workload.num_chunks // 2]
        self._bytes(workload.num_layers // 2)[block_id, workload.block_bytes // 2] ^= 0xFF
        self.synchronize()

    def find_wrong_byte(self) -> WrongByte | None:
        """Compares every byte of every layer, those of blocks outside the prompt too."""
        chunk_of_block = {block_id: chunk for chunk, block_id in enumerate(self._block_ids)}
        for layer in range(self._workload.num_layers):
            got = self._bytes(layer)
            expected = torch.full_like(got, UNTOUCHED)
            expected[self._index] = self._expected(layer)
            if torch.equal(got, expected):
                continue
            wrong = (got != expected).nonzero()
            block_id, offset = (int(number) for number in wrong[0])
            return WrongByte(
                chunk=chunk_of_block.get(block_id),
                block_id=block_id,
                layer=layer,
                offset=offset,
                expected=int(expected[block_id, offset]),
                got=int(got[block_id, offset]),
                num_wrong=len(wrong),
            )
        return None

    def synchronize(self) -> None:
        """Waits for the device: the store reads and writes memory without regard to torch's streams."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _bytes(self, layer: int) -> torch.Tensor:
        """Returns a layer as ``(num_blocks, block_bytes)`` of uint8, the same memory."""
        return self.layers[layer].view(torch.uint8).view(self._workload.num_blocks, self._workload.block_bytes)

    def _expected(self, layer: int) -> torch.Tensor:
        """Returns what a layer should hold as ``(num_chunks, block_bytes)``, in the order of the chunks."""
        chunks = range(self._workload.num_chunks)
        a, b, c = torch.tensor(
            [self._workload.coefficients(chunk, layer) for chunk in chunks], device=self.device
        ).T.unsqueeze(-1)
        i = torch.arange(PERIOD, device=self.device)
        one_period: torch.Tensor = ((a * i * i + b * i + c) % PERIOD).to(torch.uint8)
        num_bytes = self._workload.block_bytes
        return one_period.repeat(1, -(-num_bytes // PERIOD))[:, :num_bytes]
