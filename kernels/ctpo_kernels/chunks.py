"""How many rows of logits the output layer holds at a time. Needs no torch.

The number of rows changes the rounding: the weight gradient is a sum over chunks, and matrices of other shapes may be
multiplied by another algorithm. So nothing here reads free memory from a device. A caller that wants chunks sized by
free memory calls `chunk_rows` once. It uses the result for the anchor pass and for training, on all tensor-parallel
ranks and after a restart.
"""

TILE = 128
"""Rows that the gradient products leave out together; chunks are multiples of it."""

CHUNK_BYTES = {"cpu": 128 << 20, "cuda": 1216 << 20}
"""Bytes of float32 logits of one chunk, by default. The same on every GPU, whatever memory is free."""

SIZES = tuple(CHUNK_BYTES["cuda"] * 2 // 2**halved for halved in range(4))
"""What `chunk_rows` chooses among, 2.4 GiB to 304 MiB: 4096 to 512 rows of a vocabulary of 152k.

Above the largest size, the memory traffic of the weight gradient is small compared with the matrix products. Below the
smallest, it takes longer than they do, and little memory is saved.
"""

SHARE = 4
"""A chunk takes at most 1 / this of the free memory."""


def rows_within(size: int, columns: int) -> int:
    """Rows of float32 logits with `columns` columns that fit into `size` bytes: a positive multiple of TILE."""
    return max(TILE, size // (4 * max(1, columns)) // TILE * TILE)


def chunk_rows(columns: int, free_bytes: float) -> int:
    """Return the `chunk_size` for a GPU with `free_bytes` of free memory while the head runs.

    columns: of this rank's shard of the vocabulary. The largest of SIZES that is at most a quarter of the free memory,
    so that small differences in it seldom change the answer; else the smallest.
    """
    fitting = (size for size in SIZES if size * SHARE <= free_bytes)
    return rows_within(next(fitting, SIZES[-1]), columns)
