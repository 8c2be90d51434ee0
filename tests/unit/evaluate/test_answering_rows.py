"""Looking at index lists: the right row, the right token, in any batch, with any chunks."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.attention.axes import RowSpan
from gnomon.attention.geometry import RowAxis
from gnomon.attention.indices import KeySet, ListSegment, Space
from gnomon.attention.ops.values import Selection
from gnomon.attention.taps import RecordingTap
from gnomon.engine.config import EngineConfig
from gnomon.engine.core import build_core
from gnomon.engine.messages import EngineRequest
from gnomon.engine.runner import Taps
from gnomon.engine.sampling_params import SamplingParams
from gnomon.errors import GnomonError
from gnomon.evaluate.answering_rows import AnsweringRows
from gnomon.evaluate.engine_respondent import first_token_of
from gnomon.text.assets import default_tokenizer

MODELS = ("random:deepseek_v32,layers=2", "random:glm_moe_dsa,layers=4")


class Both(AnsweringRows):
    """Records everything beside."""

    def __init__(self) -> None:
        super().__init__()
        self.full = RecordingTap(wants_margin=False)

    def begin_step(self, rows: RowAxis, request_ids: object) -> None:
        super().begin_step(rows, request_ids)  # type: ignore[arg-type]
        self.full.begin_step(rows, request_ids)  # type: ignore[arg-type]

    def index(self, layer: int, selection: Selection) -> KeySet:
        self.full.index(layer, selection)
        return super().index(layer, selection)


@pytest.mark.parametrize("model", MODELS)
def test_the_lists_are_those_of_the_rows_that_answer(model: str) -> None:
    core = build_core(
        EngineConfig.of(
            model=model,
            dtype="float32",
            num_kv_pages=64,
            block_size=16,
            max_num_batched_tokens=48,
            max_model_len=200,
        ),
        None,
        512,
    )
    lengths = {"a": 90, "b": 33, "c": 150, "short": 5}
    tap = Both()
    core.taps = Taps(selection=tap)
    core.add(
        [
            EngineRequest(
                request_id=name,
                prompt_token_ids=[(length * place) % 509 for place in range(1, length + 1)],
                params=SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True),
            )
            for name, length in lengths.items()
        ]
    )
    while core.has_work:
        core.step()
    lists = tap.full.recording.index
    layers = sorted({layer for layer, _ in lists})
    assert layers
    for name, length in lengths.items():
        row = length - 1
        for wanted in range(length):
            expected = {
                layer: wanted in lists[layer, name][row].tolist()
                for layer in layers
                if (layer, name) in lists and int(lists[layer, name][row].max()) >= 0
            }
            assert tap.listed(name, row, wanted) == expected
    hits = [any(tap.listed("c", 149, wanted).values()) for wanted in range(150)]
    assert 0 < sum(hits) < 150  # lists are shorter than this context
    assert tap.listed("c", 200, 0) == {}
    tap.clear()
    assert tap.listed("c", 149, 0) == {}


def test_padding_of_a_list_is_no_position() -> None:
    tap = AnsweringRows()
    request = torch.tensor([0, 0], dtype=torch.int32)
    position = torch.tensor([0, 1], dtype=torch.int32)
    axis = RowAxis(request, position, position + 1, 2, (RowSpan(0, 0, 2, 0),), "test")
    ids = torch.tensor([[0, -1, -1], [0, 1, -1]], dtype=torch.int32)
    count = torch.tensor([1, 2], dtype=torch.int32)
    keys = KeySet(axis, (ListSegment("latents", Space.POSITION, ids, count),))
    tap.begin_step(axis, ["r"])
    assert tap.index(4, Selection(keys, None, torch.zeros(2, dtype=torch.bool))) is keys
    assert tap.listed("r", 1, -1) == {4: False}
    assert tap.listed("r", 1, 1) == {4: True}
    assert tap.listed("r", 0, 0) == {}  # not the last row of the step


@settings(max_examples=40)
@given(
    value=st.integers(1000, 999_999).map(str),
    head=st.sampled_from(["x is ", "x is", "é: ", "", "the\n\n"]),
    tail=st.sampled_from([".", " and so on", "", "é", "!\n"]),
)
def test_the_first_token_of_a_text(value: str, head: str, tail: str) -> None:
    tokenizer = default_tokenizer("deepseek_v32")
    text = f"Nobody knows why. {head}{value}{tail}"
    ids = tokenizer.encode_plain(text)
    start = len(text[: text.rindex(value)].encode())
    ends = list(accumulate(len(tokenizer.token_bytes(token)) for token in ids))
    expected = next(place for place, end in enumerate(ends) if end > start)
    assert first_token_of(value, ids, tokenizer) == expected


def test_a_text_that_is_not_there() -> None:
    tokenizer = default_tokenizer("deepseek_v32")
    with pytest.raises(GnomonError, match="does not hold '12345'"):
        first_token_of("12345", tokenizer.encode_plain("123 45"), tokenizer)
