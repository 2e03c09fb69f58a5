"""References of heads for multi-token prediction, by hand."""

import numpy as np

from llmq.ref.loss import mtp as ref


def test_positions_ahead_stay_in_their_document():
    tokens, targets = np.arange(6, dtype=np.int32)[None], 10 + np.arange(6, dtype=np.int32)[None]
    starts = np.array([[0, 0, 0, 3, 4, 4]], np.int32)
    ahead, wanted = np.empty_like(tokens), np.empty_like(targets)
    ref.mtp_shift(ahead, wanted, tokens, targets, starts, 6, 6)
    np.testing.assert_array_equal(ahead, [[1, 2, 2, 3, 5, 5]])
    np.testing.assert_array_equal(wanted, [[11, 12, -100, -100, 15, -100]])
    ref.mtp_shift(ahead, wanted, tokens, targets, None, 6, 6)
    np.testing.assert_array_equal(wanted, [[11, 12, 13, 14, 15, -100]])


def test_statistics_are_means_times_the_targets():
    """q / p is at most 1, of the token that both predict at different positions."""
    stats, log = np.zeros(2), np.log
    losses = -log(np.array([0.2, 0.5, 0.9], np.float32))
    trunk = -log(np.array([0.9, 0.8, 0.25], np.float32))
    targets, of_trunk = np.array([5, 6, -100]), np.array([4, 5, 6, 7])
    ref.mtp_stats(stats, losses, trunk, targets, of_trunk, 3, 4)
    np.testing.assert_allclose(stats[0], 4 * -log(0.2 * 0.5) / 2, rtol=1e-6)
    np.testing.assert_allclose(stats[1], 4 * (0.2 / 0.8 + 1) / 2, rtol=1e-6)
