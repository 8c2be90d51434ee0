"""The OpenAPI page is true: schemathesis makes requests from it and judges the answers.

One of its checks is left out, that every request of the right shape is accepted: what fields say
about each other (min_tokens <= max_tokens) and to the vocabulary is not in the page.
"""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest
import schemathesis
from schemathesis import Case
from schemathesis.checks import positive_data_acceptance

from gnomon.server.app import create_app
from tests.server.fake_engine import FakeEngine

app = create_app(FakeEngine(max_model_len=512))
schema = schemathesis.openapi.from_dict(app.openapi())
schema.app = app


@schema.parametrize()
@hypothesis.settings(max_examples=15, derandomize=True, database=None, deadline=None)
def test_answers_are_as_described(case: Case) -> None:
    body: Any = case.body
    if isinstance(body, dict):
        for name in ("max_tokens", "max_completion_tokens"):
            if isinstance(body.get(name), int) and body[name] > 8:
                body[name] = 8
    case.call_and_validate(excluded_checks=[positive_data_acceptance])


def test_the_page_names_every_refusal() -> None:
    page = app.openapi()
    for path in ("/v1/chat/completions", "/v1/completions"):
        described = page["paths"][path]["post"]["responses"]
        assert {"200", "400", "401", "404", "413", "429", "503"} <= set(described)


@pytest.mark.parametrize("path", ["/docs", "/redoc"])
def test_no_page_that_loads_scripts(path: str) -> None:
    assert path not in {getattr(route, "path", None) for route in app.routes}
