"""What lands on the host is what left the device, whatever happens to the source meanwhile."""

from __future__ import annotations

import numpy as np
import torch

from gnomon.engine.landing import Landing


def test_values_and_shapes_survive_and_the_source_may_be_written_again():
    ids, flags = torch.tensor([3, -1, 2**62]), torch.tensor([[True, False], [False, True]])
    values = torch.tensor([0.1, -torch.inf, torch.nan], dtype=torch.float32)
    exact = torch.tensor([0.1], dtype=torch.float64)
    landing = Landing([ids, flags, values, exact])
    for tensor in (ids, flags, values, exact):
        tensor.zero_()
    landed = landing.wait()
    assert landed[0].tolist() == [3, -1, 2**62]
    assert landed[1].tolist() == [[True, False], [False, True]]
    assert landed[1].dtype == np.bool_
    assert np.array_equal(landed[2], np.float32([0.1, -np.inf, np.nan]), equal_nan=True)
    assert landed[3].tolist() == [0.1]


def test_nothing_lands_as_nothing():
    (empty,) = Landing([torch.empty(0, dtype=torch.int64)]).wait()
    assert empty.shape == (0,)
