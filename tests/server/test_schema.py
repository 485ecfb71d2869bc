"""Requests made up from the server's own schema, right and wrong ones: its answers keep what the schema promises."""

from __future__ import annotations

import pytest

schemathesis = pytest.importorskip("schemathesis")

from hypothesis import HealthCheck, settings  # noqa: E402
from schemathesis.checks import not_a_server_error  # noqa: E402
from schemathesis.specs.openapi.checks import (  # noqa: E402
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.server.conftest import PATIENCE_S, launched  # noqa: E402

pytestmark = pytest.mark.xdist_group("servers")

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def brief(tiny_folder):
    """A server whose answers are short, whatever is asked for."""
    with launched(tiny_folder, "--served-model-name", "tiny", "--max-model-len", "40", "--kv-pages", "257") as served:
        yield served


@pytest.fixture(scope="module")
def usual(brief):
    """The answer to a good request, before all others."""
    return greeting(brief)


def greeting(served) -> str:
    answer = served.ask("/v1/completions", {"model": "tiny", "prompt": "hello", "max_tokens": 8, "temperature": 0})
    return answer.json()["choices"][0]["text"]


@pytest.fixture(scope="module")
def api(brief, usual):
    """The server's schema."""
    return schemathesis.openapi.from_url(f"{brief.url}/openapi.json")


schema = schemathesis.pytest.from_fixture("api").exclude(path="/trace")  # whose answer never ends


@schema.parametrize()
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_every_answer_is_as_the_schema_says(case, brief):
    if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
        case.body["model"] = "tiny"  # a name made up is a 404, behind which nothing is tried
    case.call_and_validate(checks=CHECKS, timeout=PATIENCE_S)


def test_the_engine_answers_as_before(brief, usual):
    assert greeting(brief) == usual
    assert brief.ask("/stats").json()["held"] == 0
    assert brief.metric("request_success_total") > 50, "most of what was made up was refused"
