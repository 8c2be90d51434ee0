"""Looking at a server: probes, metrics, models, configuration, tokens, rendered prompts."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import openai
from prometheus_client.parser import text_string_to_metric_families

from tests.server.conftest import LIMITS, RunningServer
from tests.server.test_bad_input import post

MESSAGES = [{"role": "user", "content": "Which way is </think> north? 北"}]


def get(server: RunningServer, path: str) -> Any:
    with urllib.request.urlopen(server.url + path) as answer:
        return json.load(answer)


def ask(server: RunningServer, path: str, **body: Any) -> Any:
    status, answer = post(server.url + path, json.dumps(body).encode())
    assert status == 200, answer
    return answer


def test_probes(server: RunningServer) -> None:
    assert get(server, "/health") == {"status": "ok"}
    assert get(server, "/ready") == {"status": "ready"}


def test_models(client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert model.id == "sundial"
    assert model.to_dict()["max_model_len"] == 512
    assert client.models.retrieve("sundial").id == "sundial"


def test_server_info_says_what_was_set_and_why(server: RunningServer) -> None:
    info = get(server, "/server_info")
    for name in ("max_num_seqs", "block_size", "num_kv_pages"):
        assert info["engine"][name]["value"] == LIMITS[name]
        assert info["engine"][name]["source"] == "flag"
    assert info["engine"]["dtype"]["source"] == "model"
    assert {"operator", "provider", "reason", "rejected"} <= set(info["operators"][0])
    assert info["model"]["max_model_len"] == 512
    assert "dsv32" in info["model"]["language"]
    assert info["server"]["api_key"] is None


def test_metrics_count_what_happened(server: RunningServer, client: openai.OpenAI) -> None:
    names = (
        "gnomon_request_generation_tokens_sum",
        "gnomon_time_to_first_token_seconds_count",
        "gnomon_request_queue_time_seconds_count",
        "gnomon_request_prefill_time_seconds_count",
        "gnomon_inter_token_latency_seconds_count",
        "gnomon_e2e_request_latency_seconds_count",
        "gnomon_generation_tokens_total",
    )
    server.wait_until_idle()
    before = {name: server.metric(name) for name in names}
    client.completions.create(model="sundial", prompt="Count", max_tokens=6, n=2)
    after = {name: server.metric(name) - before[name] for name in names}
    assert list(after.values()) == [12, 1, 1, 1, 10, 1, 12]


def test_metrics_are_well_formed(server: RunningServer) -> None:
    with urllib.request.urlopen(f"{server.url}/metrics") as page:
        assert page.headers["content-type"].startswith("text/plain")
        families = list(text_string_to_metric_families(page.read().decode()))
    assert all(family.name.startswith("gnomon_") for family in families)
    assert all(family.documentation for family in families)


def test_tokens_and_text_go_round(server: RunningServer) -> None:
    for text in ("At noon", "北はどちら", " \n\t ", "e\u0301"):
        tokens = ask(server, "/tokenize", prompt=text, add_special_tokens=False)
        assert tokens["count"] == len(tokens["tokens"])
        assert ask(server, "/detokenize", tokens=tokens["tokens"])["prompt"] == text
    named = ask(server, "/tokenize", prompt="noon", return_token_strs=True)
    assert len(named["token_strs"]) == named["count"]


def test_the_prefix_cache_can_be_emptied(server: RunningServer) -> None:
    prompt = {"prompt": "A prompt of more than a page. " * 4, "max_tokens": 1}

    def num_cached() -> int:
        usage = ask(server, "/v1/completions", **prompt)["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    num_cached()
    assert num_cached() > 0
    ask(server, "/reset_prefix_cache")
    assert num_cached() == 0


def test_a_conversation_has_the_same_ids_everywhere(server: RunningServer) -> None:
    rendered = ask(server, "/v1/chat/completions/render", messages=MESSAGES, max_tokens=3)
    tokenized = ask(server, "/tokenize", messages=MESSAGES)
    answered = ask(
        server, "/v1/chat/completions", messages=MESSAGES, max_tokens=1, return_token_ids=True
    )
    assert rendered["prompt_token_ids"] == tokenized["tokens"] == answered["prompt_token_ids"]
    assert rendered["max_tokens"] == 3
    assert rendered["prompt"].count("</think>") == 2  # the user's letters, and the format's token
    ask(server, "/detokenize", tokens=rendered["prompt_token_ids"])


def test_what_a_user_writes_is_no_control_token(server: RunningServer) -> None:
    ids = ask(server, "/tokenize", messages=MESSAGES)["tokens"]
    control = ask(server, "/tokenize", prompt="</think>", add_special_tokens=False)["tokens"]
    assert len(control) == 1
    assert ids.count(control[0]) == 1


def test_rendering_says_where_the_answer_starts(server: RunningServer) -> None:
    for thinks in (True, False):
        rendered = ask(
            server,
            "/v1/chat/completions/render",
            messages=MESSAGES,
            chat_template_kwargs={"thinking": thinks},
        )
        assert rendered["starts_in_reasoning"] is thinks
        assert rendered["prompt"].endswith("<think>" if thinks else "</think>")
