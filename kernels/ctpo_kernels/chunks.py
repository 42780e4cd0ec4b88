"""How many rows of logits the output layer holds at a time. Needs no torch, so configurations use it too.

Another number of rows rounds otherwise: the weight gradient is a sum over chunks, and a product of other shapes may be
another algorithm. So nothing here looks at a device: who wants chunks by free memory asks `chunk_rows` once, passes its
answer to the anchor pass and to training, on all tensor-parallel ranks, and keeps it over a restart.
"""

TILE = 128
"""Rows that the gradient products leave out together; chunks are multiples of it."""

CHUNK_BYTES = {"cpu": 128 << 20, "cuda": 1216 << 20}
"""Float32 logits of one chunk where the caller says nothing. The same on every GPU, whatever memory is free."""

SIZES = tuple(CHUNK_BYTES["cuda"] * 2 // 2**halved for halved in range(4))
"""What `chunk_rows` chooses among, 2.4 GiB to 304 MiB: 4096 to 512 rows of a vocabulary of 152k.

Beyond the largest, what the weight gradient reads and writes is small beside the products; below the smallest it takes
longer than they do, and little memory is saved.
"""

SHARE = 4
"""A chunk is at most one part in so many of the free memory."""


def rows_within(size: int, columns: int) -> int:
    """Rows of float32 logits with so many columns in `size` bytes: a multiple of TILE, at least one."""
    return max(TILE, size // (4 * max(1, columns)) // TILE * TILE)


def chunk_rows(columns: int, free_bytes: float) -> int:
    """`chunk_size` for a GPU that has `free_bytes` to spare while the head runs.

    columns: of this rank's shard of the vocabulary. The largest of SIZES that is at most a quarter of the free memory,
    so that small differences in it seldom change the answer; else the smallest.
    """
    fitting = (size for size in SIZES if size * SHARE <= free_bytes)
    return rows_within(next(fitting, SIZES[-1]), columns)
