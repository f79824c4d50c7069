"""What the demo moves: one prompt, and a KV cache whose every byte is known in advance.

Both engines compute all of it by themselves from the same few numbers, as two engines with the same model would; no
hash, key or byte is handed from one to the other but through the store.
"""

import hashlib
import struct
from dataclasses import dataclass
from typing import Final

PERIOD: Final = 251
"""Bytes after which the pattern of a block repeats: prime, so that no power of two falls on the same byte."""
VOCABULARY: Final = 32_000
NUM_PATTERNS: Final = PERIOD * (PERIOD - 1) * PERIOD


@dataclass(frozen=True)
class Workload:
    """A prompt and the shape of its KV cache: one region per layer, K and V of a block side by side."""

    num_tokens: int = 4096
    num_layers: int = 32
    block_size: int = 16
    num_heads: int = 8
    head_dim: int = 128

    @property
    def num_chunks(self) -> int:
        """Whole blocks of the prompt; the ragged tail is not cached."""
        return self.num_tokens // self.block_size

    @property
    def cached_tokens(self) -> int:
        """Tokens in whole blocks."""
        return self.num_chunks * self.block_size

    @property
    def num_blocks(self) -> int:
        """Blocks of an engine: an eighth more than the prompt needs, so that some must stay as they are."""
        return self.num_chunks + self.num_chunks // 8 + 1

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in one layer: K and V, 16-bit numbers."""
        return 2 * self.block_size * self.num_heads * self.head_dim * 2

    @property
    def row_bytes(self) -> int:
        """Bytes of one chunk over all layers, which is one object in the store."""
        return self.block_bytes * self.num_layers

    @property
    def num_bytes(self) -> int:
        """Bytes of the prompt's cache over all layers."""
        return self.row_bytes * self.num_chunks

    def block_hashes(self) -> list[bytes]:
        """Returns one hash per whole block, each over the tokens of its block and the hash before it."""
        hashes, parent = [], bytes(32)
        for block in range(self.num_chunks):
            positions = range(block * self.block_size, (block + 1) * self.block_size)
            token_ids = [position * 7919 % VOCABULARY for position in positions]
            parent = hashlib.sha256(parent + struct.pack(f"<{len(token_ids)}I", *token_ids)).digest()
            hashes.append(parent)
        return hashes

    def block_ids(self, engine: str) -> list[int]:
        """Returns the blocks in which an engine keeps the prompt's chunks: scattered, and others in each engine."""
        blocks = sorted(range(self.num_blocks), key=lambda block: hashlib.sha256(f"{engine} {block}".encode()).digest())
        return blocks[: self.num_chunks]

    def coefficients(self, chunk: int, layer: int) -> tuple[int, int, int]:
        """Returns the a, b, c of a pattern: its byte ``i`` is ``(a * i * i + b * i + c) % 251``.

        Polynomials of degree 2 over the integers modulo a prime are pairwise different, and with b from 1 up none is
        constant: no two blocks look alike, and none looks like itself shifted within a period.
        """
        index = layer * self.num_chunks + chunk
        rest, c = divmod(index, PERIOD)
        a, b = divmod(rest, PERIOD - 1)
        return a, b + 1, c
