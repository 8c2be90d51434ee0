"""Cases N of reference/bugs.md: index lists shared across layers. Pipelines come later."""

from __future__ import annotations

import pytest

from gnomon.errors import ConfigError
from gnomon.models.sources import parse_model_spec
from tests.laws.bugs.tiny import t0_spec


@pytest.mark.parametrize(
    ("layers", "pattern", "said"),
    [
        (6, "FFSS", "index_topk_pattern"),
        (4, "SFFF", "layer 0"),
        (4, "FFXS", "index_topk_pattern"),
        (3, "FFFFF", "index_topk_pattern"),
    ],
    ids=["too short", "first layer shared", "a third letter", "too long"],
)
def test_n4_a_pattern_that_does_not_fit_is_refused(layers: int, pattern: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refusal:
        parse_model_spec(t0_spec("T2", layers=layers, pattern=pattern))
    assert "allowed" in str(refusal.value)


def test_n4_patterns_that_fit_say_who_shares_with_whom() -> None:
    config = parse_model_spec(t0_spec("T2", layers=6, pattern="FFSSFS")).config
    assert [config.index_source(layer) for layer in range(6)] == [0, 1, 1, 1, 4, 4]
