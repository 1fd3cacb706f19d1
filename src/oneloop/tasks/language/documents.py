"""The tokens of documents."""

import numpy as np
from numpy.typing import NDArray


def token_ids(span: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the token ids of a span, also of tokens that are not targets."""
    return np.where(span < 0, ~span, span)
