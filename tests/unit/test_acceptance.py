"""Definitions of acceptance on counts that can be worked out by hand."""

import numpy as np
import pytest

from eagle3_lib.verdict import acceptance

REQUESTS = [[0, 3, 1], [2, 0], [3]]  # accepted counts of 6 rounds


def test_counts_and_rates():
    counts = acceptance.request_counts(REQUESTS, positions=3)
    assert counts.tolist() == [[3, 2, 1, 1], [2, 1, 1, 0], [1, 1, 1, 1]]
    assert acceptance.curve(counts).tolist() == pytest.approx([4 / 6, 3 / 6, 2 / 6])
    assert acceptance.mean_length(counts) == pytest.approx(1 + 9 / 6)
    assert acceptance.acceptance_rate(counts, np.array([9, 6, 3])) == pytest.approx(9 / 18)


def test_conditional_rates_end_where_nothing_is_accepted():
    assert acceptance.conditional([0.5, 0.25, 0.0, 0.0]) == [0.5, 0.5, 0.0, None]


def test_summary_holds_what_reports_show():
    summary = acceptance.summary(REQUESTS, positions=3)
    assert (summary["requests"], summary["rounds"], summary["accepted"]) == (3, 6, [4, 3, 2])
    length = summary["mean_length"]
    assert length["low"] <= length["value"] == 2.5 <= length["high"] and length["n"] == 3


def test_few_requests_widen_the_interval_beyond_the_percentiles():
    values = np.random.default_rng(0).normal(size=8)
    interval = acceptance.bootstrap(lambda some: some.mean(-1), values)
    draws = np.random.default_rng(0).integers(0, 8, (acceptance.RESAMPLES, 8))
    low, high = np.quantile(values[draws].mean(-1), [0.025, 0.975])
    assert interval["low"] < low and interval["high"] > high


def test_pairs_are_resampled_together():
    longer = [[count + 1 for count in rounds] for rounds in REQUESTS]
    difference = acceptance.paired_length_difference(longer, REQUESTS, positions=4)
    assert (difference["low"], difference["value"], difference["high"]) == pytest.approx((1, 1, 1))
