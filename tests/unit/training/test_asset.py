"""The model that ships: the card tells its files and its scores, and a broken choice of keys shows.

Oracle: the card's own numbers for the files; for the scores a fresh small sample of held-out
prompts (other dice than the card's), with margins for its size; transformers for the loading.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import get_args

import pytest
import torch

import gnomon
from gnomon import LLM, SamplingParams
from gnomon.models.sources import open_model
from training.card import LENGTHS, files_of, read_card
from training.data.recall import needle
from training.data.tools import task
from training.data.writing import Episode, Family, chat
from training.served import FAULTS, needle_share, open_served, split, sums_share, tool_share
from training.shapes import CONFIGS, GLM_STOP_IDS

FOLDER = Path(gnomon.__file__).parent / "assets" / "tiny"


def test_the_card_names_every_file_with_its_size_and_hash() -> None:
    assert read_card(FOLDER)["files"] == files_of(FOLDER)


def test_the_model_is_as_small_as_promised_and_has_its_mtp_layer() -> None:
    assert (FOLDER / "model.safetensors").stat().st_size <= 12_000_000
    loaded = open_model(FOLDER)
    assert loaded.config.index_n_heads >= 16
    assert loaded.config.index_topk == 64
    assert loaded.config.max_position_embeddings >= 4096
    assert loaded.config.num_nextn_predict_layers == 1
    assert {extra.key.split(".")[2] for extra in loaded.extras} == {"6"}
    assert loaded.config.kv_lora_rank == CONFIGS["tiny"]["kv_lora_rank"]


def test_the_card_reaches_the_aims() -> None:
    scores = {name: share for name, (share, _) in read_card(FOLDER)["scores"].items()}
    assert all(scores[f"needle {length}"] >= 0.98 for length in LENGTHS)
    assert scores["eval needle"] >= 0.98
    assert scores["sums +"] >= 0.9
    assert scores["sums -"] >= 0.9
    for family in get_args(Family):
        assert scores[f"tools {family} well formed"] >= 0.95
        assert scores[f"tools {family} as expected"] >= 0.95
    assert min(scores["mtp needle"], scores["mtp sums"], scores["mtp tools"]) >= 0.6
    assert all(scores[f"needle 1024, {fault}"] <= 0.2 for fault in FAULTS)


def test_the_card_tells_that_dense_attention_does_as_well() -> None:
    scores = {name: share for name, (share, _) in read_card(FOLDER)["scores"].items()}
    for name in ("eval needle", *(f"needle {length}" for length in LENGTHS)):
        assert abs(scores[name] - scores[f"{name}, dense"]) <= 0.01


def test_a_small_sample_scores_what_the_card_says() -> None:
    scores = {name: share for name, (share, _) in read_card(FOLDER)["scores"].items()}
    llm = open_served(FOLDER)
    assert needle_share(llm, 512, 20, "test") >= scores["needle 512"] - 0.1
    assert sums_share(llm, "+", 40) >= scores["sums +"] - 0.1
    assert sums_share(llm, "-", 40) >= scores["sums -"] - 0.1
    for family in ("dsv32", "glm"):
        found = tool_share(llm, family, 8, "well formed")
        assert found >= scores[f"tools {family} well formed"] - 0.15


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_a_wrong_selection_shows(fault: str) -> None:
    most = {"random lists": 0.2, "flipped rotation": 0.6, "topk 1": 0.8}[fault]
    assert needle_share(open_served(FOLDER, fault), 512, 10, "test") <= most


def test_transformers_answers_with_it_token_by_token() -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        FOLDER, dtype=torch.float32, attn_implementation="eager"
    )
    prompts = [split(case)[0] for case in sample_of_episodes()]
    assert max(map(len, prompts)) > 4 * theirs.config.index_topk
    ours = LLM(model=str(FOLDER), dtype="float32", num_kv_pages=40)
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=1, stop_token_ids=GLM_STOP_IDS)
    for prompt, output in zip(prompts, ours.generate(prompts, params, use_tqdm=False), strict=True):
        answer = output.outputs[0]
        ids = torch.tensor([[*prompt, *answer.token_ids]])
        with torch.no_grad():
            logits = theirs(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        assert logits.argmax(-1).tolist() == list(answer.token_ids)
        assert answer.logprobs is not None
        told = [one.logprob for one in answer.logprobs]
        torch.testing.assert_close(
            logits.max(-1).values, torch.tensor(told), atol=1e-3, rtol=0, check_dtype=False
        )
    asked = tokenizer("<｜User｜>What is 47 + 385?<｜Assistant｜></think>").input_ids
    assert asked in (prompts[0], prompts[0][1:]), "some versions add the start token themselves"


def sample_of_episodes() -> list[Episode]:
    """A sum, needles of two lengths, a call in each format."""
    dice = random.Random(7)
    talk = chat("dsv32")
    talk.user([("What is 47 + 385?", 0.0)])
    talk.answer("432")
    found = [talk.episode, needle(dice, 150, "dsv32", 1)[0], needle(dice, 400, "glm", 4)[0]]
    for family in get_args(Family):
        tools, said, calls = task(dice, held_out=True)
        talk = chat(family, tools=tools)
        talk.user([(said, 0.0)])
        talk.answer("", calls=calls)
        found.append(talk.episode)
    return found
