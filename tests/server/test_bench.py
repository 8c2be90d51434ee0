"""`gnomon bench serve` against a real server: every token is counted, failures are told apart."""

from __future__ import annotations

import http.server
import json
import subprocess
import sys
import threading

import pytest

from gnomon.bench.serve import (
    Answer,
    ServeResult,
    ServeSettings,
    Taken,
    answer_of,
    bench_serve,
)
from gnomon.bench.serve_client import ClientLoad, read_events
from gnomon.errors import ConfigError, GnomonError

SMALL = {"input_len": 24, "output_len": 6}


def test_every_request_and_token_is_counted(server) -> None:
    settings = ServeSettings(num_requests=5, concurrency=3, **SMALL)
    seen: list[int] = []
    result = bench_serve(server.url, "", settings, on_done=seen.append)
    assert [answer.error for answer in result.answers] == [""] * 5
    assert [answer.num_tokens for answer in result.answers] == [6] * 5
    assert sorted(seen) == [1, 2, 3, 4, 5]
    assert all(answer.ttft_ms > 0 for answer in result.good)
    rates = result.rates()
    assert rates["output_tokens_s"] == pytest.approx(30 / result.seconds)
    assert rates["total_tokens_s"] == pytest.approx((30 + 5 * 24) / result.seconds)
    server.wait_until_idle()


def test_arrivals_at_a_rate_are_spread_out(server) -> None:
    settings = ServeSettings(num_requests=4, concurrency=4, request_rate=20.0, **SMALL)
    sent = [answer.sent for answer in bench_serve(server.url, "", settings).answers]
    assert sent == sorted(sent)
    assert len(set(sent)) == 4
    server.wait_until_idle()


def test_a_refusal_is_an_answer_with_its_reason(server) -> None:
    settings = ServeSettings(num_requests=1, concurrency=1, input_len=600, output_len=6)
    (answer,) = bench_serve(server.url, "", settings).answers
    assert answer.error.startswith("HTTP 400")


def test_goodput_counts_requests_that_keep_both_bounds() -> None:
    answers = (
        Answer(0.0, (0.1, 0.2, 0.3), 3),
        Answer(0.0, (5.0, 5.1), 2),
        Answer(0.0, (0.1, 9.1), 2),
        Answer(0.0, error="HTTP 500"),
    )
    settings = ServeSettings(slo_ttft_ms=1000, slo_tpot_ms=500)
    result = ServeResult(settings, answers, 2.0)
    assert result.rates()["goodput_requests_s"] == 0.5
    assert result.rates()["requests_s"] == 1.5
    assert result.percentiles()["ttft_ms"]["p99"] == pytest.approx(5000)


def test_no_server_and_no_url_are_told_apart() -> None:
    settings = ServeSettings(num_requests=1)
    with pytest.raises(GnomonError, match="is a server running there"):
        bench_serve("http://127.0.0.1:9", "", settings)
    for url in ("ftp://x", "http://localhost:99999", "http://localhost:abc"):
        with pytest.raises(ConfigError, match="http://host:port"):
            bench_serve(url, "", settings)
    with pytest.raises(ConfigError, match="its host is no name"):
        bench_serve("http://a..b", "named", settings)
    for key in ("k\u20acy", "key\n"):
        with pytest.raises(ConfigError, match="no header can carry"):
            bench_serve("http://localhost:1", "named", settings, key)


@pytest.mark.parametrize(
    ("status", "body", "why"),
    [
        (401, b'{"error": "no key"}', r"HTTP 401: .*no key.*--api-key"),
        (200, b"<html>", "JSONDecodeError"),
        (200, b'{"data": []}', "IndexError"),
    ],
)
def test_a_server_that_names_no_model_is_told_why(status: int, body: bytes, why: str) -> None:
    class Answering(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with http.server.HTTPServer(("127.0.0.1", 0), Answering) as answering:
        thread = threading.Thread(target=answering.handle_request)
        thread.start()
        url = f"http://127.0.0.1:{answering.server_port}"
        with pytest.raises(GnomonError, match=why):
            bench_serve(url, "", ServeSettings(num_requests=1))
        thread.join()


def test_the_command_writes_table_json_and_picture(server, tmp_path) -> None:
    command = [sys.executable, "-c", "from gnomon.cli.main import main; main()", "bench", "serve"]
    command += ["--url", server.url, "--num-requests", "2", "--input-len", "9"]
    command += ["--output-len", "3", "--json", str(tmp_path / "serve.json")]
    command += ["--picture", str(tmp_path / "serve.png")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "ttft_ms" in done.stdout
    assert "2 of 2 answered" in done.stdout
    assert "client: busy" in done.stdout
    assert len(json.loads((tmp_path / "serve.json").read_text())["answers"]) == 2
    assert (tmp_path / "serve.png").stat().st_size > 1000


def test_events_without_text_count_if_they_hold_tokens() -> None:
    lines = [
        b'data: {"choices": [{"text": "", "token_ids": [99999]}]}',
        b'data: {"choices": [{"text": "a"}]}',
        b'data: {"choices": [{"text": ""}]}',
        b'data: {"choices": [], "usage": {"completion_tokens": 3}}',
        b"data: [DONE]",
    ]
    answer = answer_of(Taken(1.0, pieces(lines)), 1.0)
    assert (len(answer.arrivals), answer.num_tokens, answer.error) == (2, 3, "")


def pieces(lines: list[bytes], size: int = 0) -> list[tuple[float, bytes]]:
    """A chunked answer, cut into pieces of `size` bytes (0: whole), one a second from 2.0 on."""
    chunks = [b"%x\r\n%s\n\n\r\n" % (len(line) + 2, line) for line in lines]
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    whole = head + b"".join(chunks) + b"0\r\n\r\n"
    cuts = range(0, len(whole), size or len(whole))
    return [(2.0 + i, whole[at : at + (size or len(whole))]) for i, at in enumerate(cuts)]


@pytest.mark.parametrize("size", [1, 7, 50, 1000])
def test_an_event_has_arrived_with_the_piece_that_completes_it(size: int) -> None:
    lines = [b'data: {"n": %d, "pad": "%s"}' % (n, b"x" * n) for n in range(30)]
    cut = pieces([*lines, b"data: [DONE]"], size)
    whole = b"".join(data for _, data in cut)
    found = list(read_events(cut))
    assert [event["n"] for _, event in found] == list(range(30))
    for (arrived, _), line in zip(found, lines, strict=True):
        newline = whole.index(line) + len(line)  # the byte that completes the line
        assert arrived == 2.0 + newline // size


def test_tokens_that_come_together_count_each() -> None:
    lines = [b'data: {"choices": [{"text": "a", "token_ids": [%s]}]}' % ids
             for ids in (b"1,2", b"3", b"4,5,6")]  # fmt: skip
    cut = pieces([*lines, b"data: [DONE]"])
    head, first = cut[0][1].split(b"\r\n\r\n", 1)
    parts = [head + b"\r\n\r\n", *(part + b"\n\n" for part in first.split(b"\n\n"))]
    answer = answer_of(Taken(0.0, [(float(at), part) for at, part in enumerate(parts)]), 0.0)
    assert answer.event_tokens == (2, 1, 3)
    assert answer.num_tokens == 6
    assert answer.gaps_ms == [0.0, 1000.0, 1000.0, 0.0, 0.0]
    assert sum(answer.gaps_ms) / 5 == pytest.approx(answer.tpot_ms)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"HTTP/1.1 503 Down\r\nContent-Length: 4\r\n\r\nsoon", "HTTP 503: soon"),
        (b'HTTP/1.0 200 OK\r\n\r\ndata: {"error": "no luck"}\n\n', "no luck"),
        (b'HTTP/1.0 200 OK\r\n\r\ndata: {"n": 1}\n\n', "broke off after 1 events"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\ndata", "IncompleteRead"),
        (b"nonsense", "BadStatusLine"),
        (b"", "RemoteDisconnected"),
    ],
)
def test_what_is_no_stream_of_tokens_is_an_error(data: bytes, why: str) -> None:
    assert why in answer_of(Taken(0.0, [(1.0, data)]), 0.0).error


def test_a_client_without_time_to_spare_says_so() -> None:
    assert not ClientLoad(0.5, 0.79, 0.0).is_bottleneck
    assert ClientLoad(0.5, 0.81, 0.0).is_bottleneck
