"""Arrays on their way to a device: shapes, dtypes and values survive one shared buffer."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from gnomon.attention.upload import ALIGNMENT, through_staging, upload

DTYPES = (np.int32, np.int64, np.float32, np.bool_)
SHAPES = st.lists(st.integers(0, 5), min_size=1, max_size=3)


@given(st.lists(st.tuples(st.sampled_from(DTYPES), SHAPES), max_size=6), st.randoms())
def test_arrays_come_out_of_the_buffer_as_they_went_in(kinds, random):
    arrays = [
        np.array(random.choices(range(-9, 9), k=int(np.prod(shape))), dtype).reshape(shape)
        for dtype, shape in kinds
    ]
    tensors = through_staging(arrays, torch.device("cpu"), is_pinned=False)
    for array, tensor in zip(arrays, tensors, strict=True):
        assert tensor.shape == array.shape
        assert np.array_equal(tensor.numpy(), array)
        assert tensor.numpy().dtype == array.dtype
        assert not array.size or tensor.data_ptr() % ALIGNMENT == tensors[0].data_ptr() % ALIGNMENT


def test_a_slice_that_is_not_contiguous_is_copied_whole():
    wide = np.arange(24, dtype=np.int32).reshape(4, 6)
    (placed,) = through_staging([wide[:, 1:3]], torch.device("cpu"), is_pinned=False)
    assert placed.tolist() == wide[:, 1:3].tolist()


def test_on_the_cpu_nothing_is_copied():
    array = np.arange(3)
    (tensor,) = upload([array], "cpu")
    array[0] = 7
    assert tensor.tolist() == [7, 1, 2]
