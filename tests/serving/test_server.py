"""The server over HTTP: the official client, every bad input, limits, disconnects, metrics, shutdown."""

import asyncio
import json
import signal
import socket
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

import brimful
from brimful.errors import BadOption
from brimful.serving import server as server_module
from brimful.serving.server import ServerOptions, listen, page_policy
from tests.serving.engines import wait_until
from tests.serving.servers import NAME, call, command, question, serving
from tests.tasks.tiny_causal import CONVERSATIONS, SYSTEM

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def server(causal):
    with serving(causal.model) as made:
        yield made


@pytest.fixture(scope="module")
def endless(causal):
    """Answers as long as they may be, one at a time."""
    with serving(causal.model, endless=True, engine={"max_batch": 1}) as made:
        yield made


def client(made, key="none"):
    return openai.OpenAI(base_url=f"{made.url}/v1", api_key=key, max_retries=0, timeout=60)


def ask(made, text, **options):
    return client(made).chat.completions.create(model=NAME, messages=[{"role": "user", "content": text}], **options)


# The official client.


def test_the_official_client_gets_an_answer(server):
    answer = ask(server, "乙的花？")
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "橙色橙色。", "stop")
    assert answer.model == NAME and answer.object == "chat.completion"
    assert answer.usage.completion_tokens == 5
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 5


def test_the_official_client_gets_a_stream(server):
    chunks = list(ask(server, "乙的花？", stream=True, stream_options={"include_usage": True}))
    *texts, usage = chunks
    assert texts[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in texts) == "橙色橙色。"
    assert texts[-1].choices[0].finish_reason == "stop"
    assert usage.choices == [] and usage.usage.completion_tokens == 5
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stream_without_usage_has_none(server):
    assert all(chunk.usage is None and chunk.choices for chunk in ask(server, "甲的花？", stream=True))


def test_the_official_client_completes_a_text(server, causal):
    tokens = causal.prompts()[0]
    whole = client(server).completions.create(model=NAME, prompt=tokens)
    assert whole.choices[0].text == "红色。" and whole.usage.prompt_tokens == len(tokens)
    pieces = list(client(server).completions.create(model=NAME, prompt=tokens, stream=True))
    assert "".join(piece.choices[0].text for piece in pieces) == "红色。"
    assert pieces[-1].choices[0].finish_reason == "stop"


def test_a_conversation_and_a_system_message_reach_the_model(server):
    messages = [*CONVERSATIONS[2][:-1]]
    made = client(server).chat.completions
    assert made.create(model=NAME, messages=messages).choices[0].message.content == CONVERSATIONS[2][-1]["content"]
    told = made.create(model=NAME, messages=CONVERSATIONS[4][:-1])
    assert CONVERSATIONS[4][0] == {"role": "system", "content": SYSTEM}
    assert told.choices[0].message.content == CONVERSATIONS[4][-1]["content"]


def test_content_may_be_a_list_of_texts(server):
    parts = [{"type": "text", "text": "甲的"}, {"type": "text", "text": "花？"}]
    answer = client(server).chat.completions.create(model=NAME, messages=[{"role": "user", "content": parts}])
    assert answer.choices[0].message.content == "红色。"


def test_the_models_are_listed(server):
    models = client(server).models
    assert [one.id for one in models.list()] == [NAME]
    assert models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError):
        models.retrieve("another")


def test_several_choices_and_prompts_come_with_their_places(server, endless, causal):
    several = ask(endless, "路", n=3, temperature=2, seed=4, max_tokens=24)
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in several.choices}) > 1
    prompts = [causal.prompts()[0], causal.prompts()[3]]
    both = client(server).completions.create(model=NAME, prompt=prompts)
    assert [choice.text for choice in both.choices] == ["红色。", "橙色橙色。"]
    chunks = client(server).completions.create(model=NAME, prompt=prompts, stream=True)
    texts = ["", ""]
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == ["红色。", "橙色橙色。"]


def test_sampling_follows_the_seed(endless):
    def sampled(**options):
        return ask(endless, "路", temperature=2.0, max_tokens=24, **options).choices[0].message.content

    assert sampled(seed=1) == sampled(seed=1) != sampled(seed=2)
    assert len({sampled() for _ in range(4)}) > 1, "without a seed every answer has one of its own"


def test_a_stop_string_ends_an_answer_and_is_not_part_of_it(server):
    answer = ask(server, "乙的花？", stop=["色橙", "无"])
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("橙", "stop")
    chunks = list(ask(server, "乙的花？", stop="色橙", stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "橙"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_an_answer_ends_at_the_number_of_tokens(server, name):
    answer = ask(server, "乙的花？", **{name: 2})
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("橙色", "length")
    assert answer.usage.completion_tokens == 2


def test_log_probabilities_come_with_their_tokens(server):
    options = {"logprobs": True, "top_logprobs": 3}
    choice = ask(server, "丁的很长很长的一条路？", **options).choices[0]
    tokens = choice.logprobs.content
    assert choice.message.content == "绿色𠀀。" and len(tokens) == 7, "𠀀 has four bytes, which are tokens"
    assert b"".join(map(bytes, (one.bytes for one in tokens))).decode() == choice.message.content
    assert (tokens[0].token, tokens[2].token) == ("绿", "\\xf0")
    for one in tokens:
        likely = [other.logprob for other in one.top_logprobs]
        assert len(likely) == 3 and likely == sorted(likely, reverse=True) and one.logprob == likely[0]
    chunks = [chunk.choices[0] for chunk in ask(server, "丁的很长很长的一条路？", stream=True, **options)]
    streamed = [entry for chunk in chunks for entry in chunk.logprobs.content]
    assert [entry.bytes for entry in streamed] == [entry.bytes for entry in tokens]
    assert [entry.logprob for entry in streamed] == pytest.approx([entry.logprob for entry in tokens], abs=1e-4)
    for chunk in chunks:
        if text := chunk.delta.content:
            assert b"".join(map(bytes, (one.bytes for one in chunk.logprobs.content))).decode() == text


def test_log_probabilities_end_before_a_stop_string(server):
    for stream in (False, True):
        answer = ask(server, "乙的花？", stop="色橙", logprobs=True, stream=stream)
        choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
        assert [one.token for choice in choices for one in choice.logprobs.content] == ["橙"]
        assert all(not one.top_logprobs for choice in choices for one in choice.logprobs.content)


def test_a_completion_has_its_own_format_of_log_probabilities(server, causal):
    made = client(server).completions
    wanted = {"model": NAME, "prompt": causal.prompts()[3], "logprobs": 2}
    found = made.create(**wanted).choices[0].logprobs
    assert found.tokens == list("橙色橙色。") and found.text_offset == [0, 1, 2, 3, 4]
    for token, logprob, likely in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        assert len(likely) == 2 and likely[token] == logprob == max(likely.values())
    pieces = [piece.choices[0].logprobs for piece in made.create(**wanted, stream=True)]
    assert [offset for piece in pieces for offset in piece.text_offset] == [0, 1, 2, 3, 4]
    alone = made.create(**{**wanted, "logprobs": 0}).choices[0].logprobs
    assert [list(likely) for likely in alone.top_logprobs] == [[token] for token in found.tokens]


def test_many_clients_at_once_get_the_answers_of_one(server):
    questions = [one for one in CONVERSATIONS for _ in range(2)]

    def answer(conversation):
        made = client(server).chat.completions.create(model=NAME, messages=conversation[:-1], max_tokens=16)
        return made.choices[0].message.content

    with ThreadPoolExecutor(24) as pool:
        assert list(pool.map(answer, questions)) == [one[-1]["content"] for one in questions]


def test_an_encoder_decoder_reads_the_last_message_alone(tiny):
    with serving(tiny.model) as made:
        messages = [
            {"role": "user", "content": "丁的车是什么颜色？"},
            {"role": "assistant", "content": "绿色。"},
            {"role": "user", "content": "甲的花是什么颜色？"},
        ]
        answer = client(made).chat.completions.create(model=NAME, messages=messages)
        assert answer.choices[0].message.content == "红色。"
        assert call(f"{made.url}/status")[2]["kind"] == "questions"
        status, _, error = call(f"{made.url}{CHAT}", {"messages": [{"role": "system", "content": "a"}, messages[0]]})
        assert status == 400 and "system message needs a chat template" in error["error"]["message"]


# Bad input.

LONG = "很长" * 400
BAD = {
    "malformed JSON": (400, b'{"messages": [', "not valid JSON"),
    "not text": (400, b"\xff\xfe", "not valid JSON"),
    "deep": (400, b"[" * 100_000, "not valid JSON"),
    "a list": (400, b"[]", "the body is a list"),
    "unknown model": (404, question("甲", model="gpt-4"), "'gpt-4' does not exist here. Try: 'tiny'"),
    "no messages": (400, {"model": NAME}, "messages must be a list"),
    "empty messages": (400, {"model": NAME, "messages": []}, "messages must be a list"),
    "a message that is no object": (400, {"messages": ["甲"]}, "messages[0] is a text"),
    "an unknown role": (400, {"messages": [{"role": "king", "content": "甲"}]}, "has the role 'king'"),
    "a role that is a list": (400, {"messages": [{"role": [], "content": "甲"}]}, "has the role a list"),
    "a role that is an object": (400, {"messages": [{"role": {}, "content": "甲"}]}, "has the role an object"),
    "an unknown field that is no text": (400, rb'{"\ud800": 1, "messages": [{"role": "user", "content": "a"}]}', "is unknown"),
    "no content": (400, {"messages": [{"role": "user"}]}, "has null as its content"),
    "empty content": (400, question("  "), "messages[0] is empty"),
    "an answer at the end": (400, {"messages": [{"role": "assistant", "content": "a"}]}, "the last message has the role assistant"),
    "an image": (400, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "reads text only"),
    "a tool's answer": (400, {"messages": [{"role": "tool", "content": "4"}]}, "tools are not supported"),
    "tools": (400, question("甲", tools=[{"type": "function"}]), "the field 'tools' is not supported"),
    "a long prompt": (400, question(LONG), "tokens, and the model reads 511 at most"),
    "temperature": (400, question("甲", temperature=3), "temperature is 3 and must be a number between 0 and 2"),
    "temperature as text": (400, question("甲", temperature="hot"), "temperature is 'hot'"),
    "top_p": (400, question("甲", top_p=0), "top_p is 0 and must be a number above 0"),
    "max_tokens": (400, question("甲", max_tokens=0), "max_tokens is 0 and must be a whole number"),
    "two limits": (400, question("甲", max_tokens=1, max_completion_tokens=2), "differ"),
    "n": (400, question("甲", n=99), "n is 99"),
    "stop": (400, question("甲", stop=["a"] * 5), "stop must be"),
    "an empty stop": (400, question("甲", stop=""), "stop must be"),
    "seed": (400, question("甲", seed="one"), "seed is 'one'"),
    "stream": (400, question("甲", stream="yes"), "stream is 'yes'"),
    "stream_options": (400, question("甲", stream_options={"include_usage": True}), "only for stream=true"),
    "penalty": (400, question("甲", frequency_penalty=9), "frequency_penalty is 9"),
    "logprobs": (400, question("甲", logprobs=5), "logprobs is 5. Try: true or false"),
    "top_logprobs": (400, question("甲", logprobs=True, top_logprobs=21), "top_logprobs is 21 and must be"),
    "top_logprobs alone": (400, question("甲", top_logprobs=2), "top_logprobs needs logprobs=true"),
    "logit_bias": (400, question("甲", logit_bias={"5": 1}), "the field 'logit_bias' is not supported"),
    "JSON mode": (400, question("甲", response_format={"type": "json_object"}), "leave it out, and ask for the format in the prompt"),
    "several": (400, question("甲", tools=[{}], tool_choice="required", magic=1), "the fields 'tools' and 'tool_choice' are not supported"),
    "unknown": (400, question("甲", magic=1), "the field 'magic' is unknown"),
    "of both kinds": (
        400, question("甲", magic=1, top_k=5, min_p=0.1),
        "the fields 'top_k' and 'min_p' are not supported, and the field 'magic' is unknown. Try: leave them out.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_an_error_in_the_format_of_the_api(server, name):
    status, body, message = BAD[name]
    sent = {"data": body} if isinstance(body, bytes) else {"body": body}
    found, _, content = call(f"{server.url}{CHAT}", **sent)
    assert found == status and set(content) == {"error"}
    assert set(content["error"]) == {"message", "type", "param", "code"}
    assert message in content["error"]["message"]
    assert ask(server, "甲的花？").choices[0].message.content == "红色。", "the server goes on"


def test_errors_have_the_codes_that_clients_look_for(server):
    with pytest.raises(openai.NotFoundError) as raised:
        client(server).chat.completions.create(model="gpt-4", messages=[{"role": "user", "content": "甲"}])
    assert raised.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as raised:
        ask(server, LONG)
    assert raised.value.code == "context_length_exceeded" and raised.value.param == "messages"


@pytest.mark.parametrize(
    "options",
    [{"tools": []}, {"n": 1}, {"logprobs": False}, {"user": "me"}, {"logit_bias": {}}, {"stop": None}, {"seed": None},
     {"response_format": {"type": "text"}}, {"model": None}],
    ids=str,
)  # fmt: skip
def test_what_changes_nothing_is_accepted(server, options):
    status, _, content = call(f"{server.url}{CHAT}", question("甲的花？", **options))
    assert status == 200 and content["choices"][0]["message"]["content"] == "红色。"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [(None, "prompt must be"), ([], "prompt must be"), ([1, -1], "tokens must be between"), ([[1], "a", 2], "prompt must be"),
     (["a"] * 17, "more than 16"), ({"a": 1}, "prompt must be"), ([True], "prompt must be")],
    ids=str,
)  # fmt: skip
def test_a_bad_prompt_is_refused(server, prompt, message):
    status, _, content = call(f"{server.url}{TEXT}", {"prompt": prompt})
    assert status == 400 and message in content["error"]["message"]


def test_half_a_surrogate_pair_is_not_an_error(server):
    assert call(f"{server.url}{CHAT}", data=rb'{"messages": [{"role": "user", "content": "\ud800"}]}')[0] == 200


def test_paths_and_methods_that_are_not_there(server):
    for path, method, status in (
        ("/v2", "GET", 404),
        (CHAT, "GET", 405),
        ("/../etc/passwd", "GET", 404),
        ("/docs", "GET", 404),
    ):
        found, headers, content = call(f"{server.url}{path}", method=method)
        assert found == status and "message" in content["error"]
        assert headers["Allow"] == ("POST" if status == 405 else None)


def test_a_body_must_be_json_by_its_type(server):
    """So that no page elsewhere can send one without asking first."""
    status, _, content = call(f"{server.url}{CHAT}", question("甲"), headers={"Content-Type": "text/plain"})
    assert status == 415 and "application/json" in content["error"]["message"]


@pytest.mark.parametrize("declared", [True, False])
def test_a_large_body_is_refused(causal, declared):
    with serving(causal.model, max_body_bytes=2000) as made:
        body = json.dumps(question("长" * 3000)).encode()
        with socket.create_connection(("127.0.0.1", made.port), timeout=30) as connection:
            length = f"Content-Length: {len(body)}" if declared else "Transfer-Encoding: chunked"
            start = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{length}\r\n\r\n"
            connection.sendall(start.encode() + (b"" if declared else b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)))
            assert b" 413 " in connection.recv(4096).splitlines()[0]
        assert call(f"{made.url}/health")[0] == 200


def test_a_request_that_is_never_finished_is_given_up(causal, monkeypatch):
    monkeypatch.setattr(server_module, "BODY_S", 0.1)
    with serving(causal.model) as made, socket.create_connection(("127.0.0.1", made.port), timeout=30) as connection:
        connection.sendall(
            f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{{".encode()
        )
        assert b" 408 " in connection.recv(4096).splitlines()[0]


def test_what_is_not_http_is_refused(server):
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 400")
    assert call(f"{server.url}/health")[0] == 200


# Who may ask.


def test_a_token_is_required_where_one_is_set(causal):
    with serving(causal.model, token="secret") as made:
        for header in (None, "Bearer wrong", "Basic secret", "Bearer secret2", "secret"):
            status, headers, content = call(
                f"{made.url}{CHAT}", question("甲的花？"), headers={"Authorization": header}
            )
            assert status == 401 and headers["WWW-Authenticate"] == "Bearer"
            assert content["error"]["code"] == "invalid_api_key"
        for path in ("/status", "/metrics", "/v1/models"):
            assert call(f"{made.url}{path}")[0] == 401
        assert call(f"{made.url}/health")[0] == call(f"{made.url}/")[0] == 200
        with pytest.raises(openai.AuthenticationError):
            client(made, "wrong").models.list()
        assert [one.id for one in client(made, "secret").models.list()] == [NAME]


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::", "my-server"])
def test_other_machines_need_a_token(host):
    with pytest.raises(BadOption, match="reachable from other machines"):
        ServerOptions(host=host)
    ServerOptions(host=host, token="secret")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_this_machine_needs_none(host):
    assert ServerOptions(host=host).is_loopback


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", ""])
def test_a_name_that_was_rebound_to_loopback_is_refused(server, host):
    status, _, content = call(f"{server.url}/v1/models", headers={"Host": host})
    assert status == 403 and content["error"]["code"] == "wrong_host"


@pytest.mark.parametrize("host", ["localhost", "localhost:9", "127.0.0.1", "[::1]:8000"])
def test_names_of_loopback_are_answered(server, host):
    assert call(f"{server.url}/v1/models", headers={"Host": host})[0] == 200


def test_pages_from_elsewhere_are_refused_and_get_no_cors_headers(server):
    status, headers, _ = call(f"{server.url}{CHAT}", question("甲"), headers={"Origin": "https://evil.example"})
    assert status == 403 and not any(name.lower().startswith("access-control") for name in headers)
    status, headers, _ = call(f"{server.url}{CHAT}", method="OPTIONS", headers={"Origin": server.url})
    assert status == 405 and not any(name.lower().startswith("access-control") for name in headers)
    assert call(f"{server.url}{CHAT}", question("甲的花？"), headers={"Origin": server.url})[0] == 200


@pytest.mark.parametrize("path", ["/health", CHAT])
def test_an_origin_that_is_no_address_is_refused(server, path):
    status, _, content = call(f"{server.url}{path}", headers={"Origin": "http://["})
    assert status == 403 and content["error"]["code"] == "wrong_origin"


def test_what_is_asked_is_not_logged_unless_requested(causal):
    with serving(causal.model) as made:
        ask(made, "甲的花？")
        assert made.log == []
    with serving(causal.model, log_requests=True) as made:
        ask(made, "甲的花？")
        list(ask(made, "乙的花？", stream=True))
        logged = [json.loads(line) for line in made.log]
    assert [(one["asked"], one["answered"]) for one in logged] == [
        (["甲的花？"], ["红色。"]),
        (["乙的花？"], ["橙色橙色。"]),
    ]


def test_all_problems_of_the_options_are_reported_together():
    with pytest.raises(BadOption) as raised:
        ServerOptions(host="0.0.0.0", port=70000, grace_s=-1)
    assert all(name in str(raised.value) for name in ("port=70000", "grace=-1", "host='0.0.0.0'"))


def test_a_port_in_use_is_named():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(BadOption, match=rf"port={port} on 127.0.0.1 cannot be used .* Try: port={port + 1}"):
            listen(ServerOptions(port=port))


# Load.


def test_too_many_requests_get_429_and_when_to_come_again(causal):
    with serving(causal.model, endless=True, engine={"max_batch": 1, "max_queue": 1}) as made:
        first = ask(made, "甲", max_tokens=480, stream=True)
        next(iter(first))
        with ThreadPoolExecutor(4) as pool:
            waiting = pool.submit(call, f"{made.url}{CHAT}", question("乙", max_tokens=2))
            wait_until(lambda: made.engine.state().queued == 1)
            for stream in (False, True):
                status, headers, content = call(f"{made.url}{CHAT}", question("丙", stream=stream))
                assert status == 429 and int(headers["Retry-After"]) >= 1
                assert content["error"]["type"] == "rate_limit_error"
            with pytest.raises(openai.RateLimitError):
                ask(made, "丙")
            first.close()
            assert waiting.result(60)[0] == 200


def test_a_wait_that_is_too_long_ends_in_429(causal):
    with serving(causal.model, endless=True, engine={"max_batch": 1, "max_wait_s": 0.1}) as made:
        first = ask(made, "甲", max_tokens=480, stream=True)
        next(iter(first))
        status, headers, content = call(f"{made.url}{CHAT}", question("乙", stream=True))
        assert status == 429 and "waited 0.1 s" in content["error"]["message"] and int(headers["Retry-After"]) >= 1
        first.close()


def test_a_client_that_disconnects_frees_its_place(endless):
    for stream in (True, False):
        body = json.dumps(question("甲", max_tokens=480, stream=stream)).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        connection = socket.create_connection(("127.0.0.1", endless.port), timeout=30)
        connection.sendall(head.encode() + body)
        wait_until(lambda: endless.engine.state().running == 1)
        before = endless.engine.counts.answered
        connection.close()
        wait_until(lambda: endless.engine.idle)
        assert endless.engine.counts.answered == before, "it went on to the end"


def test_a_client_that_goes_while_it_waits_leaves_the_queue(endless):
    first = ask(endless, "甲", max_tokens=480, stream=True)
    next(iter(first))
    connection = socket.create_connection(("127.0.0.1", endless.port), timeout=30)
    body = json.dumps(question("乙")).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    wait_until(lambda: endless.engine.state().queued == 1)
    connection.close()
    wait_until(lambda: endless.engine.state().queued == 0)
    wait_until(lambda: f'{{route="{CHAT}",status="499"}} ' in call(f"{endless.url}/metrics")[2])
    assert 'status="500"' not in call(f"{endless.url}/metrics")[2]
    first.close()
    wait_until(lambda: endless.engine.idle)


def test_a_client_that_does_not_read_is_dropped_and_stalls_nobody(endless, monkeypatch):
    """Its `send` never returns, as that of a full connection."""
    monkeypatch.setattr(server_module, "SEND_S", 0.2)
    body = json.dumps(question("甲", max_tokens=480, stream=True)).encode()
    scope = {
        "type": "http", "method": "POST", "path": CHAT, "raw_path": CHAT.encode(), "query_string": b"", "http_version": "1.1",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")], "scheme": "http",
        "server": ("127.0.0.1", 1), "client": ("127.0.0.1", 2), "root_path": "",
    }  # fmt: skip

    async def stuck():
        received = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive():
            message = next(received, None)
            return message if message else await asyncio.Event().wait()

        async def send(message):
            if message["type"] == "http.response.body":
                await asyncio.Event().wait()

        await asyncio.wait_for(endless.server.app(scope, receive, send), 30)

    thread = threading.Thread(target=lambda: asyncio.run(stuck()))
    thread.start()
    wait_until(lambda: endless.engine.state().running == 1)
    assert call(f"{endless.url}/health")[0] == 200
    thread.join(30)
    wait_until(lambda: endless.engine.idle)
    assert "brimful_slow_clients_total 1" in call(f"{endless.url}/metrics")[2]
    assert call(f"{endless.url}{CHAT}", question("甲", max_tokens=2))[0] == 200


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nHost: loc"], ids=["nothing", "half a header"])
@pytest.mark.parametrize("before", [False, True], ids=["first", "second"])
def test_a_client_that_does_not_send_its_headers_is_dropped(server, monkeypatch, sent, before):
    monkeypatch.setattr(server_module, "BODY_S", 0.2)
    with socket.create_connection(("127.0.0.1", server.port), timeout=3) as connection:
        if before:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        connection.sendall(sent)
        while connection.recv(4096):  # the rest of the first answer
            pass


def test_an_answer_may_take_longer_than_its_headers(endless, monkeypatch):
    monkeypatch.setattr(server_module, "BODY_S", 0.05)
    status, _, content = call(f"{endless.url}{CHAT}", question("甲", max_tokens=400))
    assert status == 200 and content["usage"]["completion_tokens"] == 400


def test_a_request_that_cannot_fit_is_an_error_and_the_server_goes_on(causal, monkeypatch):
    from brimful.serving.admission import Admission

    real = Admission.needed_bytes
    monkeypatch.setattr(Admission, "needed_bytes", lambda self, size: 1e15 if size.final[0] > 100 else real(self, size))
    with serving(causal.model) as made:
        for stream in (False, True):
            status, _, content = call(f"{made.url}{CHAT}", question("甲的花？", max_tokens=200, stream=stream))
            assert status == 400 and content["error"]["code"] == "out_of_memory"
            assert "Try: a lower max_tokens" in content["error"]["message"]
        assert call(f"{made.url}{CHAT}", question("甲的花？"))[0] == 200


def test_an_error_of_the_server_itself_is_in_its_log_and_has_the_format_of_the_api(server, monkeypatch, caplog):
    def broken(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(server.server.api, "response", broken)
    status, headers, content = call(f"{server.url}{CHAT}", question("甲"))
    assert status == 500 and content["error"]["code"] == "internal_error"
    assert headers["Cache-Control"] == "no-store"
    wait_until(lambda: caplog.records)  # it is logged after it was sent
    assert [record.exc_info[0] for record in caplog.records] == [ZeroDivisionError]


# What it shows of itself.


def test_the_status_has_the_fields_that_the_page_reads(server):
    ask(server, "甲的花？")
    wait_until(lambda: call(f"{server.url}/status")[2]["running"] == 0)  # a row leaves after its last token was sent
    _, _, status = call(f"{server.url}/status")
    assert list(status) == [
        "model", "kind", "context_length", "device", "tokens_per_second", "memory", "running", "queued", "uptime_s", "version",
    ]  # fmt: skip
    assert set(status["memory"]) == {"used_bytes", "predicted_bytes", "limit_bytes"}
    assert (status["model"], status["kind"], status["context_length"]) == (NAME, "conversation", 512)
    assert status["version"] == brimful.__version__ and status["running"] == status["queued"] == 0


def test_the_metrics_are_prometheus_text(causal):
    with serving(causal.model) as made:
        ask(made, "甲的花？")
        call(f"{made.url}{CHAT}", {"messages": []})
        call(f"{made.url}/made/up/path")
        _, headers, text = call(f"{made.url}/metrics")
    assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
    samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert samples[f'brimful_responses_total{{route="{CHAT}",status="200"}}'] == "1"
    assert samples[f'brimful_responses_total{{route="{CHAT}",status="400"}}'] == "1"
    assert samples['brimful_responses_total{route="other",status="404"}'] == "1"
    assert samples["brimful_answer_tokens_total"] == "3"
    assert samples['brimful_time_to_first_token_seconds_bucket{le="+Inf"}'] == "1"
    assert {f"brimful_memory_{name}_bytes" for name in ("used", "predicted", "limit")} <= set(samples)
    assert all(float(value) >= 0 for value in samples.values())


def test_the_page_may_load_nothing_from_elsewhere(server):
    status, headers, page = call(f"{server.url}/")
    policy = headers["Content-Security-Policy"]
    assert status == 200 and headers["Content-Type"].startswith("text/html") and "<title>" in page
    assert policy == page_policy(page) and policy.startswith("default-src 'none'") and "unsafe" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"


# The command.


def test_sigterm_finishes_what_is_in_flight_and_exits_with_0(causal):
    with command(causal.model, "--name", NAME) as made:
        url = f"{made.url}{CHAT}"
        # A token that was generated becomes likelier, so the answer does not end before its limit.
        body = json.dumps(question("乙的花？", stream=True, max_tokens=480, repetition_penalty=0.01)).encode()
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as response:
            first = response.readline()
            made.process.send_signal(signal.SIGTERM)
            rest = response.read()
        assert first.startswith(b"data: ") and rest.rstrip().endswith(b"data: [DONE]")
        assert b'"finish_reason":"length"' in rest
        assert made.process.wait(30) == 0
        with pytest.raises(OSError):
            urllib.request.urlopen(f"{made.url}/health", timeout=5)


def test_requests_that_outlast_the_grace_period_get_an_error(causal):
    with serving(causal.model, endless=True, grace_s=0.2, engine={"max_batch": 1}) as made:
        stream = ask(made, "甲", max_tokens=480, stream=True)
        next(iter(stream))
        waiting = threading.Thread(target=lambda: results.append(call(f"{made.url}{CHAT}", question("乙"))))
        results = []
        waiting.start()
        wait_until(lambda: made.engine.state().queued == 1)
        slow = made.engine._step
        made.engine._step = lambda: (time.sleep(0.02), slow())[1]  # so that the answer outlasts it
        made.server.stop()
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)
        waiting.join(30)
        status, headers, content = results[0]
        assert status == 503 and "shutting down" in content["error"]["message"]
        assert content["error"]["type"] == "server_error" and headers["Retry-After"] == "60"


def test_the_command_says_what_it_chose_and_takes_the_token_of_the_environment(causal):
    with command(causal.model, "--memory-limit", "64MiB", BRIMFUL_TOKEN="secret") as made:
        assert made.ready["kind"] == "conversation" and made.ready["limit_bytes"] == 64 * 2**20
        assert all({"value", "reason"} == set(choice) for choice in made.ready["choices"].values())
        assert call(f"{made.url}/status")[0] == 401
        status = call(f"{made.url}/status", headers={"Authorization": "Bearer secret"})[2]
        assert status["memory"]["limit_bytes"] == 64 * 2**20 and status["model"] == made.ready["model"]
