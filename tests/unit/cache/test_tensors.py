"""Cache tensors: one pool per part, page operations on whole groups, memory that is not there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gnomon.attention.layouts import Fp8IndexKeyLayout, Fp8LatentLayout, KVLayout, PlainLayout
from gnomon.cache.free_memory import free_memory_bytes
from gnomon.cache.rules import Banks, Overwrite, Private
from gnomon.cache.schema import CacheSchema, GroupSpec, PartSpec
from gnomon.cache.tensors import CacheTensors
from gnomon.errors import ConfigError, LayoutError

LAYOUTS: dict[str, KVLayout] = {
    "latent": Fp8LatentLayout(8, 4),
    "key": Fp8IndexKeyLayout(8),
    "bf16": PlainLayout(torch.bfloat16, 3),
    "fp16": PlainLayout(torch.float16, 3),
    "fp32": PlainLayout(torch.float32, 3),
    "fp64": PlainLayout(torch.float64, 3),
}
TOKENS = GroupSpec("tokens", tuple(PartSpec(n, layout, 0) for n, layout in LAYOUTS.items()), 4)
STATE = GroupSpec(
    "state", (PartSpec("state", PlainLayout(torch.float32, 5), 1),), 1, 1, Private(), Banks(3)
)
SCHEMA = CacheSchema((TOKENS, STATE))
PAGES = {"tokens": 6, "state": 4}


def stamped() -> CacheTensors:
    """Tensors whose every byte tells its page: page * 7 + 1, and in "state" the bank too."""
    tensors = CacheTensors(SCHEMA, PAGES)
    for name, pool in tensors.pools.items():
        banks = 3 if name == "state" else 1
        for physical in range(pool.num_pages):
            pool.storage[physical] = (physical // banks) * 7 + 1 + physical % banks
    return tensors


def test_shapes_and_bytes() -> None:
    tensors = CacheTensors(SCHEMA, PAGES)
    assert tensors.pool("latent").storage.shape == (6, 4 * 20)
    assert tensors.pool("state").storage.shape == (12, 20)
    assert tensors.num_bytes == sum(pool.storage.numel() for pool in tensors.pools.values())
    assert tensors.num_bytes == 6 * SCHEMA.bytes_per_page("tokens") + 4 * 60
    for name, pool in tensors.pools.items():
        assert pool is tensors.pool(name)
        assert not pool.storage.any()
    with pytest.raises(ConfigError, match="no cache part 'layers-9'; this model has latent"):
        tensors.pool("layers-9")


@given(data=st.data())
@pytest.mark.parametrize("group", ["tokens", "state"])
def test_page_operations_equal_a_dict(group: str, data: st.DataObject) -> None:
    """All parts and banks of the named pages change together, and nothing else changes."""
    tensors = stamped()
    expected = {page: page * 7 + 1 for page in range(PAGES[group])}
    real = st.integers(1, PAGES[group] - 1)
    for action in data.draw(st.lists(st.sampled_from(["copy", "zero", "poison"]), max_size=4)):
        written = data.draw(st.lists(real, unique=True))
        if action == "copy":
            read = data.draw(st.lists(real, min_size=len(written), max_size=len(written)))
            tensors.copy_pages(group, read, written)
            before = dict(expected)
            expected.update({d: before[s] for s, d in zip(read, written, strict=True)})
        elif action == "zero":
            tensors.zero_pages(group, written)
            expected.update(dict.fromkeys(written, 0))
        else:
            tensors.poison(group, written)
            expected.update(dict.fromkeys(written, 255))
    for name, pool in tensors.pools.items():
        of_group = (name == "state") == (group == "state")
        for physical in range(pool.num_pages):
            page, bank = divmod(physical, 3 if name == "state" else 1)
            value = expected[page] if of_group else page * 7 + 1
            stamp = value if value in (0, 255) else value + bank
            assert pool.storage[physical].eq(stamp).all(), (name, page, bank)


@pytest.mark.parametrize("name", LAYOUTS)
def test_whatever_is_read_from_a_poisoned_page_is_nan(name: str) -> None:
    tensors = CacheTensors(SCHEMA, PAGES)
    tensors.poison("tokens", [2, 4])
    layout = LAYOUTS[name]
    got = layout.gather(tensors.pool(name), torch.arange(6 * 4)).view(6, 4, layout.dim)
    assert got[[2, 4]].isnan().all()
    assert got[[0, 1, 3, 5]].eq(0).all()


def test_pages_that_are_not_there() -> None:
    tensors = CacheTensors(SCHEMA, PAGES)
    for pages in ([6], [1, -1], [2**40]):
        with pytest.raises(LayoutError, match=r"'tokens' has pages 0 \.\. 5; got"):
            tensors.zero_pages("tokens", pages)
        with pytest.raises(LayoutError, match="has pages"):
            tensors.poison("tokens", pages)
    with pytest.raises(LayoutError, match="has pages"):
        tensors.copy_pages("tokens", [9], [1])
    with pytest.raises(LayoutError, match="as many sources"):
        tensors.copy_pages("tokens", [1, 2], [3])
    with pytest.raises(LayoutError, match="no destination twice"):
        tensors.copy_pages("tokens", [1, 2], [3, 3])
    with pytest.raises(LayoutError, match="null page"):
        tensors.copy_pages("tokens", [1], [0])
    with pytest.raises(ConfigError, match="no cache group 'other'"):
        tensors.zero_pages("other", [1])


def test_page_counts_that_do_not_fit_the_schema() -> None:
    for counts in ({"tokens": 4}, {"tokens": 4, "state": 4, "more": 4}, {}):
        with pytest.raises(ConfigError, match="page counts are needed"):
            CacheTensors(SCHEMA, counts)
    with pytest.raises(ConfigError, match="'state' needs at least 2 pages"):
        CacheTensors(SCHEMA, {"tokens": 4, "state": 1})


def test_memory_that_is_not_free_is_named() -> None:
    need = 6 * SCHEMA.bytes_per_page("tokens") + 4 * 60
    assert CacheTensors(SCHEMA, PAGES, free_bytes=need).num_bytes == need
    pattern = rf"needs {need} bytes on cpu \(tokens: 6 pages.*but {need - 1} bytes are free.*Lower"
    with pytest.raises(ConfigError, match=pattern):
        CacheTensors(SCHEMA, PAGES, free_bytes=need - 1)


def test_an_allocation_that_fails_is_named() -> None:
    counts = {"tokens": 2**42, "state": 4}
    with pytest.raises(ConfigError, match=r"the cache needs \d+ bytes .*tokens: 4398046511104"):
        CacheTensors(SCHEMA, counts, free_bytes=2**62)


def test_the_same_schema_with_overwrite_has_one_bank() -> None:
    group = GroupSpec("state", STATE.parts, 1, 1, Private(), Overwrite())
    assert CacheTensors(CacheSchema((group,)), {"state": 4}).pool("state").num_pages == 4


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_free_memory_is_the_least_of_what_the_system_tells(tmp_path: Path) -> None:
    assert free_memory_bytes("cpu", tmp_path) is None
    write(tmp_path, "proc/meminfo", "MemTotal: 9000 kB\nMemAvailable:    5000 kB\n")
    assert free_memory_bytes("cpu", tmp_path) == 5000 * 1024
    group = "sys/fs/cgroup"
    write(tmp_path, f"{group}/memory.max", "max\n")
    write(tmp_path, f"{group}/memory.current", "300000\n")
    assert free_memory_bytes("cpu", tmp_path) == 5000 * 1024
    write(tmp_path, f"{group}/memory.max", "1000000\n")
    assert free_memory_bytes("cpu", tmp_path) == 700_000
    write(tmp_path, f"{group}/memory.stat", "anon 5\ninactive_file 50000\n")
    assert free_memory_bytes("cpu", tmp_path) == 750_000
    write(tmp_path, f"{group}/memory/memory.limit_in_bytes", "100\n")
    write(tmp_path, f"{group}/memory/memory.usage_in_bytes", "700\n")
    assert free_memory_bytes("cpu", tmp_path) == 0
