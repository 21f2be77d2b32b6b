"""What a target says about one block, short of its whole law: made where the logits are, judged where the block is."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from outrider.law.sparse import Float32Array, Int32Array


@dataclass(frozen=True)
class SupportRows:
    """The target's law on the draft's support S, and the tail beside it; SupportRows in target.proto.

    Attributes:
        probs: [sum(sizes)] float32, target_probs of the support tokens, in the order of the draft law's token_ids.
        tail_masses: [lookahead + 1] float64, sum of target_probs outside S. The last row's S is empty.
        tail_tokens: [lookahead + 1] int32, drawn outside S by inverse CDF with the RESAMPLE noise of the row's position.
    """

    probs: Float32Array
    tail_masses: npt.NDArray[np.float64]
    tail_tokens: Int32Array
