"""Where the rows and the scale rows of q, k and v lie in fp8 checkpoints of MiMo-V2.

The published files were cut for as many devices as the model has KV heads in its full layers. Each device's chunk is
[Q_c; K_c; V_c], and its blocks of 128 rows are counted from the top of the chunk. In a chunk of V2.5:

    rows     0 ....... 3071 | 3072 ... 3199 | 3200 .. 3263 | 3264 .. 3327 | 3328 .. 3391
             Q, 16 heads    | K 0-127       | K 128-191    | V 0-63       | V 64-127
    block    0 ....... 23   | 24            | 25           | 25           | 26

K and V share block 25. Blocks of 64 rows, a common divisor of all borders, split it: K has three of them with the
factors of rows 24, 24, 25 and V two with 25, 26. So q, k and v are each exact without being quantised anew. Heads have
192 rows, and so Q has blocks of 64 as well: a head's factors are its own, and are sharded with it.

V2-Flash has the same chunks cut apart into three tensors: a block's factors lie with the part that its first row
belongs to. Some re-exports store [Q; K; V] whole (one chunk), or three tensors with blocks of their own.
"""

from dataclasses import dataclass
from math import gcd

from mimo_jax.families.source import FLOATS, FP8, Piece, Source, merged
from pallas_kernels.formats import Fp8Block

PARTS = ("q", "k", "v")


@dataclass(frozen=True)
class Chunks:
    """`count` equal chunks; heads of Q, K and V in one of them, and rows of a head."""

    count: int
    heads: tuple[int, int, int]
    sizes: tuple[int, int, int]

    @property
    def rows(self) -> tuple[int, ...]:
        """Of Q, K and V in one chunk."""
        return tuple(heads * size for heads, size in zip(self.heads, self.sizes, strict=True))

    @property
    def chunk_rows(self) -> int:
        return sum(self.rows)

    def start(self, part: int) -> int:
        """The first row of a part, inside a chunk."""
        return sum(self.rows[:part])

    def chunk_blocks(self, block: int) -> int:
        return -(-self.chunk_rows // block)

    def pieces(self, name: str, part: int) -> tuple[Piece, ...]:
        """The rows of a part in the fused tensor `name`."""
        firsts = [chunk * self.chunk_rows + self.start(part) for chunk in range(self.count)]
        return tuple(Piece(name, (first, first + self.rows[part])) for first in firsts)

    def finer(self, part: int, block: int) -> int:
        """The largest block that no border of the part or of one of its heads cuts: heads can go to any device."""
        return gcd(block, self.start(part), self.sizes[part])

    def scale_rows(self, part: int, block: int) -> list[tuple[int, int]]:
        """(chunk, block in the chunk) for each of the part's finer blocks."""
        starts = range(self.start(part), self.start(part) + self.rows[part], self.finer(part, block))
        return [(chunk, row // block) for chunk in range(self.count) for row in starts]

    def owners(self, block: int) -> list[tuple[int, int]]:
        """(part, row among the part's own) for each block of a chunk: the part that its first row belongs to."""
        owned = [0, 0, 0]
        owners = []
        for first in range(0, self.chunk_rows, block):
            part = 0 if first < self.start(1) else 1 if first < self.start(2) else 2
            owners.append((part, owned[part]))
            owned[part] += 1
        return owners

    def owned(self, part: int, block: int) -> int:
        return sum(owner == part for owner, _ in self.owners(block))


def fused_fp8(name: str, chunks: Chunks, block: tuple[int, int]) -> tuple[Fp8Block, ...]:
    """q, k and v out of the fused tensor `name`."""
    per_chunk = chunks.chunk_blocks(block[0])
    scale = name + "_scale_inv"

    def part_of(part: int) -> Fp8Block:
        rows = [(scale, chunk * per_chunk + row) for chunk, row in chunks.scale_rows(part, block[0])]
        values = Source(chunks.pieces(name, part), dtypes=(FP8,))
        return Fp8Block(values, Source(merged(rows), dtypes=FLOATS), (chunks.finer(part, block[0]), block[1]))

    return tuple(part_of(part) for part in range(len(PARTS)))


def split_fp8(prefix: str, chunks: Chunks, block: tuple[int, int]) -> tuple[Fp8Block, ...]:
    """q, k and v out of three tensors whose blocks are those of the chunks they were cut from."""
    owners = chunks.owners(block[0])
    names = [f"{prefix}{part}_proj.weight" for part in PARTS]

    def scale_row(chunk: int, row: int) -> tuple[str, int]:
        owner, own_row = owners[row]
        return names[owner] + "_scale_inv", chunk * chunks.owned(owner, block[0]) + own_row

    def part_of(part: int) -> Fp8Block:
        rows = [scale_row(chunk, row) for chunk, row in chunks.scale_rows(part, block[0])]
        values = Source((Piece(names[part]),), dtypes=(FP8,))
        return Fp8Block(values, Source(merged(rows), dtypes=FLOATS), (chunks.finer(part, block[0]), block[1]))

    return tuple(part_of(part) for part in range(len(PARTS)))
