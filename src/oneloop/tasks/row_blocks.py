"""Blocks of rows of a large matrix of similarities."""

_SIMILARITIES = 1 << 20  # of one block


def row_blocks(rows: int, columns: int) -> list[slice]:
    """Return the blocks of rows of a matrix of similarities."""
    each = max(1, _SIMILARITIES // columns)
    blocks = []
    for start in range(0, rows, each):
        blocks.append(slice(start, min(start + each, rows)))
    return blocks
