"""The http and judge scorers against a real server: what it may do wrong, and what is said then."""

import base64
import io
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import ValidationError

from g2rpo_ray.common.prompt_text import PromptText
from g2rpo_ray.rewards.registry import make_scorer, parse_options
from g2rpo_ray.rewards.scorer import RewardScorer, ScorerError
from g2rpo_ray.rewards.scorers import endpoint as endpoint_module
from tests.rewards.judge_server import Answer, FakeEndpoint, serving

PICTURES = torch.arange(3, dtype=torch.uint8)[:, None, None, None].expand(3, 4, 6, 3) * 50
PROMPTS = ["a cat", "zwölf Boxkämpfer, 猫, قطة 🐈", "nul \0 and a {brace}"]
SCORES = {"scores": [0.5, -1, 3]}
KEY = "sk-very-secret-key"


@pytest.fixture
def server() -> Iterator[FakeEndpoint]:
    with serving() as endpoint:
        yield endpoint


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "FIRST_PAUSE_S", 0.01)


def http_scorer(url: str, **options: Any) -> RewardScorer:
    return make_scorer("http", {"url": url, "timeout_s": 20.0, **options}, "cpu")


def judge(server: FakeEndpoint, **options: Any) -> RewardScorer:
    settings = {"url": f"{server.url}/v1", "model": "judge-7b", "timeout_s": 20.0, **options}
    return make_scorer("judge", settings, "cpu")


def says(text: Any, **choice: Any) -> Answer:
    return Answer({"choices": [{"message": {"role": "assistant", "content": text}, **choice}]})


def error_of(scorer: RewardScorer) -> str:
    with pytest.raises(ScorerError) as caught:
        scorer.score(PICTURES, PROMPTS)
    return str(caught.value)


# The protocol of ``http``


def test_http_sends_pictures_and_prompts_and_returns_scores(server: FakeEndpoint) -> None:
    server.answers = [Answer(SCORES)]
    scores = http_scorer(server.url + "/score").score(PICTURES, PROMPTS)
    assert scores.tolist() == [0.5, -1, 3]
    assert scores.dtype == torch.float32
    (request,) = server.requests
    assert server.paths == ["/score"]
    assert request["protocol"] == 1
    assert request["prompts"] == PROMPTS
    for text, picture in zip(request["pictures"], PICTURES, strict=True):
        image = Image.open(io.BytesIO(base64.b64decode(text)))
        assert (np.array(image) == picture.numpy()).all()


def test_http_sends_metadata_where_it_is_asked_to(server: FakeEndpoint) -> None:
    prompts = [PromptText("a fox", {"tag": "one"}), "two dogs", PromptText("x", {"n": [1, {}]})]
    for sends in (True, False):
        server.answers = [Answer(SCORES)]
        http_scorer(server.url, sends_metadata=sends).score(PICTURES, prompts)
    first, second = server.requests
    assert first["metadata"] == [{"tag": "one"}, {}, {"n": [1, {}]}]
    assert "metadata" not in second
    assert first["prompts"] == second["prompts"] == ["a fox", "two dogs", "x"]


def test_http_null_is_no_answer_and_not_zero(server: FakeEndpoint) -> None:
    server.answers = [Answer({"scores": [1, None, 0]})]
    scores = http_scorer(server.url).score(PICTURES, PROMPTS)
    assert scores.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        (b"<html>oops</html>", "answered no JSON: '<html>oops</html>'"),
        (b"\xff\xfe\x00", "answered no JSON"),
        (b"", "answered no JSON"),
        ([1, 2, 3], "expected {\"scores\": [...]}"),
        ({"score": [1, 2, 3]}, "expected {\"scores\": [...]}"),
        ({"scores": "1 2 3"}, "expected {\"scores\": [...]}"),
        ({"scores": [1, 2]}, "2 scores for 3 pictures"),
        ({"scores": [1, 2, 3, 4]}, "4 scores for 3 pictures"),
        ({"scores": [1, "2", 3]}, "score 1 is '2'; expected a number"),
        ({"scores": [True, 2, 3]}, "score 0 is True; expected a number"),
        ({"scores": [1, 2, [3]]}, "score 2 is [3]; expected a number"),
    ],
)  # fmt: skip
def test_http_garbage_is_refused_at_once(server: FakeEndpoint, body: Any, cause: str) -> None:
    server.answers = [Answer(body)]
    message = error_of(http_scorer(server.url))
    assert server.url in message
    assert cause in message
    assert len(server.requests) == 1


# What any endpoint may do


@pytest.mark.parametrize("score", [-1.5, 3, 1e300])
def test_http_scores_out_of_range_are_refused(server: FakeEndpoint, score: float) -> None:
    server.answers = [Answer({"scores": [0.0, score, 1.0]})]
    assert "allowed -1 to 1" in error_of(http_scorer(server.url, minimum=-1, maximum=1))


def test_pauses_grow_to_a_longest_one(
    server: FakeEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An endpoint that was down for minutes is asked soon after it is back."""
    pauses: list[float] = []
    monkeypatch.setattr(endpoint_module.time, "sleep", pauses.append)
    monkeypatch.setattr(endpoint_module, "FIRST_PAUSE_S", 0.5)
    server.answers = [*[Answer("busy", 503)] * 9, Answer(SCORES)]
    scorer = http_scorer(server.url, tries=10, timeout_s=60)
    assert scorer.score(PICTURES, PROMPTS).tolist() == SCORES["scores"]
    assert [pause for pause in pauses if pause] == [0.5, 1, 2, 4, 8, 8, 8, 8, 8]


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_a_failure_that_passes_is_tried_again(server: FakeEndpoint, status: int) -> None:
    server.answers = [Answer("busy", status), Answer("busy", status), Answer(SCORES)]
    assert http_scorer(server.url).score(PICTURES, PROMPTS).tolist() == SCORES["scores"]
    assert len(server.requests) == 3


@pytest.mark.parametrize("status", [429, 500])
def test_a_failure_that_stays_is_named_after_the_last_try(
    server: FakeEndpoint, status: int
) -> None:
    server.answers = [Answer("out of memory", status)]
    message = error_of(http_scorer(server.url, tries=3))
    assert f"{server.url}: status {status}: '\"out of memory\"'" in message
    assert "gave up after try 3 of 3" in message
    assert len(server.requests) == 3


@pytest.mark.parametrize("status", [301, 400, 401, 404])
def test_a_refusal_is_not_tried_again(server: FakeEndpoint, status: int) -> None:
    server.answers = [Answer("no", status, {"Location": "http://127.0.0.1:1/"})]
    assert f"status {status}" in error_of(http_scorer(server.url))
    assert len(server.requests) == 1


def test_the_server_says_how_long_to_wait(server: FakeEndpoint) -> None:
    server.answers = [Answer("busy", 429, {"Retry-After": "1"}), Answer(SCORES)]
    started_s = time.monotonic()
    http_scorer(server.url).score(PICTURES, PROMPTS)
    assert time.monotonic() - started_s >= 1


def test_a_wait_beyond_the_time_out_ends_at_once(server: FakeEndpoint) -> None:
    server.answers = [Answer("busy", 429, {"Retry-After": "3600"})]
    message = error_of(http_scorer(server.url))
    assert "gave up after try 1 of 4 (timeout_s 20)" in message


# For longer than pytest would wait.
@pytest.mark.parametrize(
    "slow",
    [Answer(SCORES, delay_s=4000.0), Answer(SCORES | {"more": "a" * 20_000}, trickle_s=0.2)],
    ids=["silent", "trickle"],
)
def test_a_slow_server_is_left_at_the_time_out(server: FakeEndpoint, slow: Answer) -> None:
    server.answers = [slow]
    message = error_of(http_scorer(server.url, timeout_s=0.5))
    assert "in time" in message
    assert "(timeout_s 0.5)" in message


def test_a_server_that_is_down_is_named() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    message = error_of(http_scorer(url, tries=2))
    assert f"{url}: no connection" in message
    assert "after try 2 of 2" in message


def test_an_endless_answer_is_cut(server: FakeEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "MAX_ANSWER_BYTES", 1000)
    server.answers = [Answer(b"x" * 100_000)]
    assert "answered more than 1000 bytes" in error_of(http_scorer(server.url))


# Keys and certificates


def test_the_key_comes_from_the_environment_and_is_never_shown(
    server: FakeEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    server.answers = [Answer(f"bad key {KEY}", 401)]
    message = error_of(http_scorer(server.url, api_key_env="JUDGE_KEY"))
    assert server.headers[0]["Authorization"] == f"Bearer {KEY}"
    assert KEY not in message
    assert "bad key ***" in message


def test_user_password_and_key_in_the_url_come_from_the_environment(
    server: FakeEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"A_USER": "me", "A_PASS": "p@ss/w:rd", "A_KEY": "k&y=1"}.items():
        monkeypatch.setenv(name, value)
    host = server.url.removeprefix("http://").rstrip("/")
    server.answers = [Answer("bad k&y=1 of p@ss/w:rd", 401)]
    url = "http://${A_USER}:${A_PASS}@" + host + "/v1?key=${A_KEY}"
    message = error_of(http_scorer(url))
    basic = base64.b64encode(b"me:p@ss/w:rd").decode()
    assert server.headers[0]["Authorization"] == f"Basic {basic}"
    assert "p@ss/w:rd" not in message
    assert "k&y=1" not in message
    assert "bad *** of ***" in message
    monkeypatch.setenv("A_KEY", f"Basic {basic}")
    server.answers = [Answer(SCORES)]
    http_scorer(server.url, api_key_env="A_KEY").score(PICTURES, PROMPTS)
    assert server.headers[1]["Authorization"] == f"Basic {basic}"


def test_no_connection_shows_nothing_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", "qu/ery")
    message = error_of(http_scorer("http://127.0.0.1:1/v1?key=${A_KEY}", tries=1))
    assert "no connection" in message
    assert not [text for text in ("qu/ery", "qu%2Fery") if text in message]


def test_a_key_that_is_not_there_is_named_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(ScorerError, match="environment variable JUDGE_KEY"):
        http_scorer("http://127.0.0.1:1", api_key_env="JUDGE_KEY")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate that nobody signed, for localhost, with its key in the same file."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    file = tmp_path_factory.mktemp("tls") / "localhost.pem"
    command = [
        "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2",
        "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost",
        "-keyout", str(file), "-out", str(file.with_suffix(".crt")),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    file.write_text(file.read_text() + file.with_suffix(".crt").read_text())
    return file


def test_a_certificate_that_nobody_vouches_for_is_refused(certificate: Path) -> None:
    with serving(certificate) as server:
        server.answers = [Answer(SCORES)]
        assert "TLS certificate refused" in error_of(http_scorer(server.url))
        assert server.requests == []


def test_a_certificate_of_ones_own_can_be_trusted(certificate: Path) -> None:
    with serving(certificate) as server:
        server.answers = [Answer(SCORES)]
        scorer = http_scorer(server.url, ca_file=str(certificate.with_suffix(".crt")))
        assert scorer.score(PICTURES, PROMPTS).tolist() == SCORES["scores"]


# The judge


def test_a_judge_is_asked_about_each_picture(server: FakeEndpoint) -> None:
    server.answers = [says("Good colours.\nFinal Score: 3.5")]
    scores = judge(server, concurrency=1).score(PICTURES, PROMPTS)
    assert scores.tolist() == [3.5] * 3
    assert server.paths == ["/v1/chat/completions"] * 3
    for request, prompt, picture in zip(server.requests, PROMPTS, PICTURES, strict=True):
        assert request["model"] == "judge-7b"
        assert request["temperature"] == 0
        image, text = request["messages"][0]["content"]
        assert f"«{prompt}»" in text["text"]
        header, _, data = image["image_url"]["url"].partition(",")
        assert header == "data:image/png;base64"
        shown = np.array(Image.open(io.BytesIO(base64.b64decode(data))))
        assert (shown == picture.numpy()).all()


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        (says("I like it."), "has 0 numbers that match"),
        (says(""), "has 0 numbers"),
        (says("Final Score: high"), "has 0 numbers"),
        (says("Final Score: 2. No, Final Score: 4"), "has 2 numbers"),
        (says("Final Score: 9"), "gives 9; allowed 1 to 5"),
        (says("Final Score: -3"), "gives -3; allowed 1 to 5"),
        (says("Final Score: nan"), "has 0 numbers"),
        (says(None), "content is NoneType"),
        (says([{"type": "text"}]), "content is list"),
        (says("Final Score: 4", finish_reason="length"), "cut at max_tokens 512"),
        (Answer({"choices": []}), "expected a chat completion"),
        (Answer({"error": "no such model"}), "expected a chat completion"),
        (Answer(["Final Score: 4"]), "expected a chat completion"),
        (Answer(b"Final Score: 4"), "answered no JSON"),
    ],
)
def test_an_answer_that_is_no_judgement_is_never_a_number(
    server: FakeEndpoint, answer: Answer, cause: str
) -> None:
    server.answers = [answer]
    message = error_of(judge(server))
    assert f"{server.url}/v1/chat/completions: " in message
    assert cause in message


def test_one_bad_judgement_fails_all_of_the_request(server: FakeEndpoint) -> None:
    server.answers = [says("Final Score: 3"), says("no idea"), says("Final Score: 3")]
    assert "'no idea'" in error_of(judge(server, concurrency=1))


def test_no_more_calls_than_allowed_are_under_way(server: FakeEndpoint) -> None:
    server.answers = [Answer(says("Final Score: 3").body, delay_s=0.1)]
    pictures = PICTURES.repeat(4, 1, 1, 1)
    judge(server, concurrency=3).score(pictures, PROMPTS * 4)
    assert 2 <= server.most_at_once <= 3


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"template": "how good?"}, "template lacks {prompt}"),
        ({"pattern": "Score"}, "pattern has 0 groups"),
        ({"pattern": "("}, "no regular expression"),
        ({"minimum": 5.0}, "minimum 5 is not below maximum 5"),
        ({"url": "ftp://host"}, "url"),
        ({"api_key": KEY}, "api_key"),
        ({"verify": False}, "verify"),
    ],
)
def test_settings_that_cannot_work_are_refused(options: dict[str, Any], cause: str) -> None:
    settings = {"url": "http://localhost/v1", "model": "m"} | options
    with pytest.raises(ValidationError) as caught:
        parse_options("judge", settings)
    assert cause in str(caught.value)
