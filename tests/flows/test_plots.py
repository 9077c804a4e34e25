"""Plots of long runs: what is drawn of a curve of very many points."""

from __future__ import annotations

from itertools import pairwise

import pytest

from flows.plots import MOST_POINTS, thinned


@pytest.mark.parametrize("count", [0, 1, MOST_POINTS, MOST_POINTS + 1, 54_321])
def test_a_curve_is_thinned_evenly_and_ends_where_it_ended(count: int) -> None:
    points = [(float(i), -float(i)) for i in range(count)]
    drawn = thinned(points)
    assert len(drawn) <= MOST_POINTS and drawn[-1:] == points[-1:]
    assert len({b[0] - a[0] for a, b in pairwise(drawn)}) <= 1
    if count <= MOST_POINTS:
        assert drawn == points
