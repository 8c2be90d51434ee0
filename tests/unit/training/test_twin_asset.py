"""The shipped model with shared selections: card and files agree, scores hold, faults show.

Oracle: the card's own numbers for the files; for the scores a fresh small sample of held-out
prompts in GLM's format (other dice than the card's), with margins for its size; transformers for
the logits.
"""

from __future__ import annotations

import random

import pytest
import torch

from gnomon import LLM, SamplingParams
from gnomon.models.built_in import built_in_folder
from gnomon.models.sources import open_model
from training.card import LENGTHS, files_of, read_card
from training.data.recall import needle
from training.data.tools import task
from training.data.writing import chat
from training.served import FAULTS_OF, needle_share, open_served, split, sums_share, tool_share
from training.shapes import GLM_STOP_IDS

FOLDER = built_in_folder("tiny_glm")


def test_the_card_names_every_file_with_its_size_and_hash() -> None:
    assert read_card(FOLDER)["files"] == files_of(FOLDER)


def test_its_layers_share_and_its_sizes_are_those_of_its_twin() -> None:
    loaded, twin = open_model(FOLDER), open_model(None)
    assert loaded.config.indexer_types == ("full", "full", "shared", "shared", "shared", "full")
    assert loaded.config.indexer_rope_interleave
    assert {extra.key.split(".")[2] for extra in loaded.extras} == {"6"}
    for name in ("index_topk", "hidden_size", "num_hidden_layers", "kv_lora_rank", "rope"):
        assert getattr(loaded.config, name) == getattr(twin.config, name)
    assert (FOLDER / "model.safetensors").stat().st_size <= 12_000_000


def test_the_card_reaches_the_aims() -> None:
    scores = {name: share for name, (share, _) in read_card(FOLDER)["scores"].items()}
    assert scores["eval needle"] >= 0.98
    assert abs(scores["eval needle"] - scores["eval needle, dense"]) <= 0.01
    for length in LENGTHS:  # the hardest wordings: the aim of 98 % is missed, as the card says
        assert scores[f"needle {length}"] >= 0.93
        assert abs(scores[f"needle {length}"] - scores[f"needle {length}, dense"]) <= 0.02
    assert scores["sums +"] >= 0.9
    assert scores["sums -"] >= 0.9
    assert scores["tools glm well formed"] >= 0.95
    assert scores["tools glm as expected"] >= 0.95
    assert min(scores["mtp needle"], scores["mtp sums"], scores["mtp tools"]) >= 0.6
    assert all(scores[f"needle 1024, {fault}"] <= 0.2 for fault in FAULTS_OF["glm"])


def test_a_small_sample_scores_what_the_card_says() -> None:
    scores = {name: share for name, (share, _) in read_card(FOLDER)["scores"].items()}
    llm = open_served(FOLDER)
    assert needle_share(llm, 512, 20, "test", "glm") >= scores["needle 512"] - 0.1
    assert sums_share(llm, "+", 40, family="glm") >= scores["sums +"] - 0.1
    found = tool_share(llm, "glm", 8, "well formed")
    assert found >= scores["tools glm well formed"] - 0.15


@pytest.mark.parametrize("fault", sorted(FAULTS_OF["glm"]))
def test_a_wrong_selection_shows(fault: str) -> None:
    assert needle_share(open_served(FOLDER, fault), 512, 8, "test", "glm") <= 0.2


def test_transformers_answers_with_it_token_by_token() -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        FOLDER, dtype=torch.float32, attn_implementation="eager"
    )
    dice = random.Random(7)
    tools, said, calls = task(dice, held_out=True)
    talk = chat("glm", tools=tools)
    talk.user([(said, 0.0)])
    talk.answer("", calls=calls)
    episodes = [needle(dice, 150, "glm", 1)[0], needle(dice, 400, "glm", 4)[0], talk.episode]
    prompts = [split(episode)[0] for episode in episodes]
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
        told = torch.tensor([one.logprob for one in answer.logprobs])
        torch.testing.assert_close(
            logits.max(-1).values, told, atol=1e-3, rtol=0, check_dtype=False
        )
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
    turn = [{"role": "user", "content": "What is 47 + 385?"}]
    asked = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    assert asked.startswith("[gMASK]<sop>")
    assert "<|user|>What is 47 + 385?<|assistant|>" in asked.replace("\n", "")
