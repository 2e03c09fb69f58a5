"""Reference of filling."""

import numpy as np

from llmq.base.dtypes import BF16
from llmq.ref.fill import fill


def test_value_is_rounded_to_the_dtype():
    for dtype, want in ((np.float32, np.float32(0.1)), (BF16.numpy, 0.10009765625)):
        x = np.full((3, 5), np.nan, dtype)
        fill(x, 0.1, 15)
        np.testing.assert_array_equal(x.astype(np.float32), np.float32(want))
