"""The model that ships answers on a GPU as on the CPU, token for token, in float32."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gnomon.models.built_in import built_in_folder
from gnomon.text.tokenizer import Tokenizer
from tests.engine.tiny_engine import outputs, request
from tests.gpu.test_engine import core_on

pytestmark = pytest.mark.gpu

CASES = json.loads(
    (Path(__file__).parents[1] / "engine" / "tiny_prompts.json").read_text(encoding="utf-8")
)


@pytest.mark.parametrize("is_eager", [False, True], ids=["graphs", "eager"])
def test_fifty_prompts_have_the_cpus_tokens(is_eager: bool) -> None:
    tokenizer = Tokenizer.from_folder(built_in_folder())
    requests = [
        request(
            f"case-{place}",
            tokenizer.encode_with_specials(case["text"], add_special_tokens=False),
            num_new=6,
        )
        for place, case in enumerate(CASES)
    ]
    flags = {"model": None, "max_num_seqs": 16, "max_model_len": 1024}
    expected = outputs(core_on("cpu", **flags), requests)
    found = outputs(core_on("cuda", enforce_eager=is_eager, **flags), requests)
    assert found == expected
