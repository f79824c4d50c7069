"""KV cache groups and ranks: which layers share keys, which rank owns which shard, and who saves which chunk.

The numbers are those of vLLM 0.32.0's connector, because they end up in the text of the keys: where fewer KV heads than
tensor-parallel ranks leave several ranks with the same bytes, the keys carry the number of the shard, not of the rank.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Self

from mooncrate.errors import LayoutError


class GroupKind(StrEnum):
    """What a group needs at the end of a prefix before the prefix can be reused."""

    FULL_ATTENTION = "full_attention"
    """Every chunk of the prefix."""
    SLIDING_WINDOW = "sliding_window"
    """The chunks that the window reaches back over."""
    RECURRENT = "recurrent"
    """The last chunk: its state sums up everything before it."""


@dataclass(frozen=True)
class CacheGroup:
    """Layers that share one block size and one block table.

    Attributes:
        kind: What the group needs at the end of a prefix.
        block_size: Tokens per block, and so per chunk.
        window: Tokens that one token attends to, itself included; None unless ``kind`` is sliding window.
        tp_replicas: Tensor-parallel ranks, neighbours in rank order, that hold the same bytes. 1 when every rank holds
            a shard of its own; ``tp_size // num_kv_heads`` with fewer KV heads than ranks; ``tp_size`` when all ranks
            hold everything, as with MLA.

    Example:
        >>> CacheGroup.sliding_window(16, window=128).kind.value
        'sliding_window'
    """

    kind: GroupKind
    block_size: int
    window: int | None = None
    tp_replicas: int = 1

    def __post_init__(self) -> None:
        """Checks every number.

        Raises:
            LayoutError: A number that is no positive integer, an unknown kind, or a window where none belongs.
        """
        try:
            object.__setattr__(self, "kind", GroupKind(self.kind))
        except ValueError as error:
            raise LayoutError(
                f"{self.kind!r} is not one of the group kinds {[str(kind) for kind in GroupKind]}"
            ) from error
        check_integer("block_size", self.block_size, least=1)
        check_integer("tp_replicas", self.tp_replicas, least=1)
        if self.kind is GroupKind.SLIDING_WINDOW:
            check_integer("window", self.window, least=1)
        elif self.window is not None:
            raise LayoutError(f"window is {self.window!r}, but a group of kind {self.kind} has no window")

    @classmethod
    def full_attention(cls, block_size: int, *, tp_replicas: int = 1) -> Self:
        """Returns a group whose tokens attend to the whole prefix."""
        return cls(GroupKind.FULL_ATTENTION, block_size, tp_replicas=tp_replicas)

    @classmethod
    def sliding_window(cls, block_size: int, window: int, *, tp_replicas: int = 1) -> Self:
        """Returns a group whose tokens attend to the last ``window`` tokens, themselves included."""
        return cls(GroupKind.SLIDING_WINDOW, block_size, window, tp_replicas)

    @classmethod
    def recurrent(cls, block_size: int, *, tp_replicas: int = 1) -> Self:
        """Returns a group that keeps one state per block, of all tokens up to the block's end."""
        return cls(GroupKind.RECURRENT, block_size, tp_replicas=tp_replicas)


class RankNamespace(NamedTuple):
    """The numbers in a pool key that say whose bytes it names, in the order of the key's text but for the group."""

    tp_rank: int
    pcp_rank: int
    dcp_rank: int
    pp_rank: int


@dataclass(frozen=True)
class RankTopology:
    """Where one worker stands among the ranks of its engine, and what follows from it for keys.

    Decode-context parallelism is a subdivision of the other ranks and not a dimension of its own, so its rank can be
    computed and is checked: ``(tp_rank * pcp_size + pcp_rank) % dcp_size``.

    Attributes:
        tp_rank: Tensor-parallel rank.
        tp_size: Tensor-parallel ranks.
        pp_rank: Pipeline stage.
        pp_size: Pipeline stages.
        pcp_rank: Prefill-context-parallel rank.
        pcp_size: Prefill-context-parallel ranks.
        dcp_rank: Decode-context-parallel rank.
        dcp_size: Decode-context-parallel ranks; divides ``tp_size * pcp_size``.

    Example:
        Eight ranks and two KV heads: rank 6 holds the second head, as three others do, and saves every fourth chunk.

        >>> topology, group = RankTopology(tp_rank=6, tp_size=8), CacheGroup.full_attention(16, tp_replicas=4)
        >>> topology.key_tp_rank(group), topology.put_step(group), topology.put_step_rank(group)
        (1, 4, 2)
        >>> [namespace.tp_rank for namespace in topology.lookup_ranks(group)]
        [0, 1]
    """

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    pcp_rank: int = 0
    pcp_size: int = 1
    dcp_rank: int = 0
    dcp_size: int = 1

    def __post_init__(self) -> None:
        """Checks every number.

        Raises:
            LayoutError: A size below 1, a rank outside its size, or a decode-context rank that cannot be.
        """
        for name in ("tp", "pp", "pcp", "dcp"):
            rank, size = getattr(self, f"{name}_rank"), getattr(self, f"{name}_size")
            check_integer(f"{name}_size", size, least=1)
            check_integer(f"{name}_rank", rank, least=0)
            if rank >= size:
                raise LayoutError(f"{name}_rank {rank} is not below {name}_size {size}")
        if self.tp_size * self.pcp_size % self.dcp_size:
            raise LayoutError(
                f"{self.tp_size} tensor-parallel x {self.pcp_size} prefill-context-parallel ranks cannot be divided "
                f"into groups of dcp_size {self.dcp_size}"
            )
        expected = self._dcp_rank_of(self.tp_rank, self.pcp_rank)
        if self.dcp_rank != expected:
            raise LayoutError(
                f"dcp_rank is {self.dcp_rank}, but with dcp_size {self.dcp_size} it is {expected} at tp_rank "
                f"{self.tp_rank} and pcp_rank {self.pcp_rank} of {self.pcp_size}"
            )

    def key_tp_rank(self, group: CacheGroup) -> int:
        """Returns the shard of the group that this rank owns: the ``tp_rank`` of its keys, shared by all replicas.

        Raises:
            LayoutError: The group's replicas do not fit these ranks; every method here raises it then.
        """
        return self.tp_rank // self._replicas(group)

    def put_step(self, group: CacheGroup) -> int:
        """Returns how many ranks share the saving of each shard: this rank saves one chunk of that many."""
        return self._replicas(group)

    def put_step_rank(self, group: CacheGroup, group_id: int = 0) -> int:
        """Returns the remainder that this rank saves: chunks with ``chunk_id % put_step == put_step_rank``.

        Replicas are neighbours, so their remainders are all different and together they save every chunk once, whatever
        ``group_id`` is.

        Args:
            group: The group.
            group_id: Its index in the engine. It shifts the remainder, so that the first chunks of several groups do
                not all fall to the same rank.
        """
        check_integer("group_id", group_id, least=0)
        return (self.tp_rank + group_id) % self._replicas(group)

    def own_ranks(self, group: CacheGroup) -> RankNamespace:
        """Returns the numbers in the keys that this rank saves and loads."""
        return RankNamespace(self.key_tp_rank(group), self.pcp_rank, self.dcp_rank, self.pp_rank)

    def lookup_ranks(self, group: CacheGroup) -> tuple[RankNamespace, ...]:
        """Returns every namespace that must hold a chunk before the chunk counts as present, whoever asks.

        In the order in which vLLM asks: by prefill-context rank, then shard, then pipeline stage.
        """
        return tuple(
            RankNamespace(shard, pcp_rank, self._dcp_rank_of(shard, pcp_rank), pp_rank)
            for pcp_rank in range(self.pcp_size)
            for shard in range(self.tp_size // self._replicas(group))
            for pp_rank in range(self.pp_size)
        )

    def _dcp_rank_of(self, tp_rank: int, pcp_rank: int) -> int:
        return (tp_rank * self.pcp_size + pcp_rank) % self.dcp_size

    def _replicas(self, group: CacheGroup) -> int:
        """Returns the group's replicas, once they are known to fit.

        Under decode-context parallelism equal heads still mean different tokens, so there no two ranks hold the same.
        """
        replicas = group.tp_replicas
        if self.tp_size % replicas:
            raise LayoutError(
                f"{self.tp_size} tensor-parallel ranks cannot be divided into {replicas} replicas per shard"
            )
        if replicas > 1 and self.dcp_size > 1:
            raise LayoutError(
                f"{replicas} replicas per shard with dcp_size {self.dcp_size}: ranks that hold different tokens are no "
                "replicas, use tp_replicas=1"
            )
        return replicas


def check_integer(name: str, value: object, *, least: int) -> None:
    """Checks an integer. A boolean is one to Python, but never what was meant.

    Raises:
        LayoutError: ``value`` is no integer, or less than ``least``.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise LayoutError(f"{name} is {value!r}, which is not an integer")
    if value < least:
        raise LayoutError(f"{name} is {value}, less than {least}")
