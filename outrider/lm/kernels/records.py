"""What is handed to the kernels: addresses (int64) and sizes. Strides count bytes."""

import numpy as np

# Keys that are weighed at once. A row's keys are cut at multiples of it, wherever the row is computed.
CHUNK = 128

# Weights lie in panels of so many outputs, outrider/lm/kernels/panels.py.
PANEL = 8


def _record(integers: str, floats: str = "") -> np.dtype[np.void]:
    return np.dtype(
        [(it, np.int64) for it in integers.split()] + [(it, np.float32) for it in floats.split()], align=True
    )


# Consecutive positions of a sequence: where they begin in the pass and in the sequence, and its pages [pages] int64.
UNIT = _record("row rows start pages")

# One attention. query [n, ...] float32 with the heads side by side, output [n, heads * dim] float32. `keys`, as
# KvStorage.layers. `split`: chunks are shared among the threads, and `partial` [units * kv_heads, chunks, most, dim +
# 2] takes what they give; most is the rows of a unit, one for each head. `scratch` has `scratch_size` bytes a thread.
ATTENTION = _record(
    "query query_stride output keys units unit_count kv_heads group dim page_size slots window split chunks most"
    " partial scratch scratch_size",
    "scale",
)

# One linear layer: weights in panels, bias [outputs] float32 or 0.
LINEAR = _record("weights bias outputs inputs")

# A layer's weights; norms are float32 and 0 where there are none.
LAYER = np.dtype(
    [(it, LINEAR) for it in ("query_key_value", "output", "gate_up", "down")]
    + [(it, np.int64) for it in ("before_attention", "before_mlp", "query_norm", "key_norm", "keys", "window")],
    align=True,
)

# A pass through layers. hidden [rows, size] is changed in place; `slots` [rows] int64; cos and sin [rows, dim] float32;
# normed, mixed, attended and gate_up are scratch of `rows` rows each.
PASS = np.dtype(
    [(it, np.int64) for it in ("layers", "layer_count", "rows", "size")]
    + [(it, np.int64) for it in ("hidden", "normed", "mixed", "gate_up", "cos", "sin", "slots")]
    + [("epsilon", np.float32), ("attention", ATTENTION)],
    align=True,
)

# A linear layer by itself: from input [rows, inputs] float32 to output [rows, outputs] float32.
PRODUCT = np.dtype([("linear", LINEAR), ("rows", np.int64), ("input", np.int64), ("output", np.int64)], align=True)


def scratch_size(most: int, dim: int) -> int:
    """Bytes that a thread needs for an attention: queries, scores, what a chunk gives and what all of them gave."""
    return 4 * most * (dim + CHUNK + 8 + 2 * (dim + 2)) + 256
