"""Serving side by side: Brimful, `transformers serve`, and one request at a time, same model, same memory, in one run.

    python bench/serve.py --device cuda --memory-limit 20GiB --output serve.jsonl          on a GPU
    python bench/serve.py --device cpu --quick                                             tiny models, two minutes
    python bench/serve.py --device cuda --cases t5 --entries brimful,one --clients 64

Cases: **t5** is T5 of 187.7 M parameters (`chatlm-base`), **causal** a decoder of 0.5 B in the shape of Qwen2; with `--quick` they are
`chatlm-tiny` and `causal-tiny`. Weights are new, because speed does not depend on them; such a model hardly ever ends an answer by
itself, so every answer has `--new-tokens` tokens. Prompts are the questions of the demo's rows.

Entries: **brimful** is the server of `brimful serve`. **transformers** is `transformers serve`, and **transformers-cb** the same with
`--continuous-batching` (causal models only; T5 is not among its models). **one** is `model.generate` for one request after another,
behind a queue in the order of arrival and without HTTP, so its figures have nothing to pay for a server.

After a first answer that does not count, each client asks, reads the stream to its end and asks again, for `--seconds` after `--warm-seconds`, and then reads on for a while. An answer
counts in **requests/s** and **tokens/s** with the share of its stream, from the first piece to the last, that lies within these seconds: 64
clients that began together also end together, and counting whole answers would depend on where the last second falls. **first** is the time
from a request to its first piece of text, median and 95th percentile of all answers that count. **ratio** is
tokens/s over those of `one` with as many clients. A server is a process of its own, under the cap of `--memory-limit` (torch's on the
process); clients are coroutines in this one. **transformers-cb** reserves its cache at the start, by itself a share of the whole card, so it is
told that share of the cap (`CACHE_SHARE`). Errors are counted, and an entry that cannot start is a result with its reason.

Needs fastapi and uvicorn for the servers, and not the packages of Brimful's command line.
"""

import argparse
import asyncio
import json
import os
import queue
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from brimful.tasks.demo import train_file
from brimful.tasks.presets import CHAT_TEMPLATE, PRESETS, Preset
from brimful.units import parse_bytes

HALF_BILLION = Preset(
    model_type="qwen2", vocab=151936, worst_shape=(512,), global_batch=1,
    sizes={"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2,
           "num_hidden_layers": 24, "max_position_embeddings": 4096},
)  # fmt: skip
CASES = {"t5": PRESETS["chatlm-base"], "causal": HALF_BILLION}
QUICK = {"t5": PRESETS["chatlm-tiny"], "causal": PRESETS["causal-tiny"]}
ENTRIES = {"t5": ("brimful", "one"), "causal": ("brimful", "transformers", "transformers-cb", "one")}
SPECIAL = 16
"""The first ids of a tokenizer are those of special tokens, with room to spare."""
CACHE_SHARE = 0.8
"""Of the cap, what continuous batching has for its cache; 0.8 to 0.9 of what is free is its default."""
END_S = 5.0
"""How long a server may take to end, which is not measured."""
READ_ON_S = 4.0
"""How long clients read on when the time is over."""


@dataclass
class Figures:
    """What the clients of one point saw."""

    started_s: float
    ended_s: float
    first_s: list[float] = field(default_factory=list)
    requests: float = 0.0
    tokens: float = 0.0
    errors: dict[str, int] = field(default_factory=dict)

    def add(self, asked_s: float, first_s: float | None, tokens: int) -> None:
        """An answer that ended now; it counts with the share of its stream within the time of the figures."""
        if first_s is None:
            return
        begun_s, ended_s = asked_s + first_s, time.monotonic()
        within_s = min(ended_s, self.ended_s) - max(begun_s, self.started_s)
        if within_s > 0:
            share = within_s / (ended_s - begun_s)
            self.requests += share
            self.tokens += share * tokens
            self.first_s.append(first_s)

    def fail(self, reason: str) -> None:
        self.errors[reason] = self.errors.get(reason, 0) + 1

    def to_json(self) -> dict[str, Any]:
        seconds, first = self.ended_s - self.started_s, sorted(self.first_s)
        return {
            "requests_per_s": self.requests / seconds, "tokens_per_s": self.tokens / seconds, "requests": self.requests,
            "first_s": statistics.median(first) if first else None,
            "first_p95_s": first[min(len(first) - 1, int(0.95 * len(first)))] if first else None, "errors": self.errors,
        }  # fmt: skip


def main() -> None:
    options = _arguments()
    if options.process is not None:
        _serve_brimful(options)
        return
    if options.table is not None:
        print(table([json.loads(line) for line in options.table.read_text().splitlines()]))
        return
    rows = []
    for case in options.cases:
        with tempfile.TemporaryDirectory(prefix="brimful-serve-") as folder:
            model = make_model(Path(folder) / case, (QUICK if options.quick else CASES)[case], options.device)
            for entry in [one for one in ENTRIES[case] if one in options.entries]:
                for row in _measure(entry, case, model, options):
                    rows.append(row)
                    print(json.dumps(row), file=sys.stderr, flush=True)
                    if options.output is not None:
                        with options.output.open("a") as file:
                            file.write(json.dumps(row) + "\n")
    print(table(rows))


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown, one line for each point."""
    baseline = {(row["case"], row["clients"]): row.get("tokens_per_s") for row in rows if row["entry"] == "one"}
    lines = [
        "| case | clients | entry | requests/s | tokens/s | first, median | first, p95 | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: (row["case"], row["clients"])):
        begin = f"| {row['case']} | {row['clients']} | {row['entry']} |"
        if not row.get("requests"):
            lines.append(f"{begin} – | – | – | – | {row.get('failed') or row.get('errors') or 'no answer'} |")
            continue
        base = baseline.get((row["case"], row["clients"]))
        ratio = f"{row['tokens_per_s'] / base:.2f}" if base else "–"
        errors = f" ({sum(row['errors'].values())} errors)" if row["errors"] else ""
        first = " | ".join(
            "–" if row[name] is None else f"{1000 * row[name]:.0f} ms" for name in ("first_s", "first_p95_s")
        )
        lines.append(f"{begin} {row['requests_per_s']:.1f} | {row['tokens_per_s']:.0f} | {first} | {ratio}{errors} |")
    return "\n".join(lines)


def make_model(folder: Path, preset: Preset, device: str) -> Path:
    """A model folder with new weights, a tokenizer of the demo's rows and, for a causal model, a chat template."""
    import torch

    from brimful.data.tokenizer.folder import TokenizerFacts, write_template
    from brimful.data.tokenizer.train import TokenizerOptions, train_tokenizer
    from brimful.tasks.model_folder import model_class

    train_tokenizer([str(train_file())], output=folder, options=TokenizerOptions(vocab_size=min(preset.vocab, 4096)))
    words = TokenizerFacts.read(folder).vocab_size
    if preset.causal:
        write_template(folder, CHAT_TEMPLATE)
    config = preset.config()
    torch.manual_seed(0)
    model = model_class(config).from_config(config)
    if preset.causal and device != "cpu":
        model = model.to(torch.bfloat16)
    with torch.no_grad():  # a head that is tied to these rows never chooses them: special tokens and ids without a text
        embeddings = model.get_input_embeddings().weight
        embeddings[:SPECIAL] = embeddings[words:] = 0
    model.save_pretrained(folder)
    return folder


def questions() -> list[str]:
    return [json.loads(line)["prompt"] for line in train_file().read_text(encoding="utf-8").splitlines()]


def _measure(entry: str, case: str, model: Path, options: argparse.Namespace) -> Any:
    """One row of figures for each number of clients."""
    if entry == "one":
        yield from _measure_generate(case, model, options)
        return
    port = _free_port()
    process = _start(entry, model, port, options)
    try:
        failed = _wait_for(process, port, entry, options.start_seconds) or _first_answer(port, model, options)
        if failed and (words := _last_words(process)):
            failed += f": {words}"
        for clients in options.clients:
            row = {"case": case, "entry": entry, "clients": clients, "device": options.device}
            if failed:
                yield row | {"failed": failed}
                continue
            figures = asyncio.run(_load(port, str(model), clients, options))
            yield row | figures.to_json()
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _start(entry: str, model: Path, port: int, options: argparse.Namespace) -> "subprocess.Popen[str]":
    log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - the process writes to it
    limit = options.memory_limit or ""
    if entry == "brimful":
        words = [
            __file__,
            "--process",
            str(model),
            "--port",
            str(port),
            "--device",
            options.device,
            "--memory-limit",
            limit,
        ]
    else:
        flags = [
            "serve",
            str(model),
            "--port",
            str(port),
            "--device",
            options.device,
            "--dtype",
            "auto",
            "--host",
            "127.0.0.1",
        ]
        flags += ["--continuous-batching"] if entry == "transformers-cb" else []
        lines = ["import sys", f"sys.argv[1:] = {flags!r}"]
        if limit and options.device != "cpu":
            lines += ["import torch", f"share = {parse_bytes(limit)} / torch.cuda.mem_get_info()[1]", "torch.cuda.set_per_process_memory_fraction(share)"]  # fmt: skip
            if entry == "transformers-cb":
                lines.append(f"sys.argv += ['--cb-max-memory-percent', f'{{{CACHE_SHARE} * share:.4f}}']")
        words = ["-c", "\n".join([*lines, "from transformers.cli.transformers import app", "app()"])]
    process = subprocess.Popen(
        [sys.executable, *words], stdout=log, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTORCH_ALLOC_CONF": "expandable_segments:True"},
    )  # fmt: skip
    process.log = log  # type: ignore[attr-defined]
    return process


def _wait_for(process: Any, port: int, entry: str, start_s: float) -> str | None:
    """Why the server did not start; None once it answers."""
    end = time.monotonic() + start_s
    while time.monotonic() < end:
        if process.poll() is not None:
            return f"{entry} ended with {process.returncode}"
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=2) as connection:
                connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                if b" 200 " in connection.recv(100):
                    return None
        except OSError:
            pass
        time.sleep(0.2)
    return f"{entry} did not answer after {start_s:g} s"


def _last_words(process: Any) -> str:
    """Of its log, which may say why it did not answer. The server writes to this file, so it is opened again."""
    lines = [line.strip() for line in Path(f"/proc/self/fd/{process.log.fileno()}").read_text().splitlines()]
    return next((line[:160] for line in reversed(lines) if line), "")


def _first_answer(port: int, model: Path, options: argparse.Namespace) -> str | None:
    """Why there is none; some servers read their model with the first request."""
    try:
        asyncio.run(asyncio.wait_for(_ask(port, str(model), questions()[0], options.new_tokens), options.start_seconds))
    except (OSError, ValueError, TimeoutError, asyncio.IncompleteReadError) as error:
        return f"no first answer: {str(error)[:80] or type(error).__name__}"
    return None


async def _load(port: int, model: str, clients: int, options: argparse.Namespace) -> Figures:
    begin = time.monotonic() + options.warm_seconds
    figures, texts = Figures(begin, begin + options.seconds), questions()

    async def client(number: int) -> None:
        place = number
        while time.monotonic() < figures.ended_s:
            try:
                async with asyncio.timeout(options.seconds + 120):
                    asked = time.monotonic()
                    figures.add(asked, *await _ask(port, model, texts[place % len(texts)], options.new_tokens))
            except (OSError, ValueError, TimeoutError, asyncio.IncompleteReadError) as error:
                figures.fail(str(error)[:80] or type(error).__name__)
                await asyncio.sleep(0.1)
            place += clients

    tasks = [asyncio.create_task(client(number)) for number in range(clients)]
    await asyncio.wait(tasks, timeout=max(0.0, figures.ended_s + READ_ON_S - time.monotonic()))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return figures


async def _ask(port: int, model: str, text: str, new_tokens: int) -> tuple[float | None, int]:
    """The time to the first piece of an answer, and its tokens: those of the usage, else as many as were asked for."""
    body = json.dumps(
        {"model": model, "messages": [{"role": "user", "content": text}], "stream": True, "max_tokens": new_tokens,
         "stream_options": {"include_usage": True}}
    ).encode()  # fmt: skip
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    started, first, tokens = time.monotonic(), None, new_tokens
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    try:
        writer.write(head.encode() + body)
        status = await reader.readline()
        if b" 200 " not in status:
            raise ValueError(status.decode().strip() or "no response")
        while line := await reader.readline():
            if not line.startswith(b"data: {"):
                if line.startswith(b"data: [DONE]"):
                    break
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise ValueError(str(chunk["error"])[:80])
            if first is None and chunk.get("choices") and chunk["choices"][0]["delta"].get("content"):
                first = time.monotonic() - started
            if chunk.get("usage"):
                tokens = chunk["usage"]["completion_tokens"]
    finally:
        writer.close()
    return first, tokens


def _measure_generate(case: str, folder: Path, options: argparse.Namespace) -> Any:
    """`generate` for one request after another, in the order in which they come."""
    import torch
    from transformers import GenerationConfig

    from brimful.planning.plan_options import PlanOptions
    from brimful.planning.target import autocast_dtype, find_target
    from brimful.serving.chat_model import ChatModel
    from brimful.tasks.generate import GenerateOptions

    target = find_target(PlanOptions(device=options.device, memory_limit=options.memory_limit))
    model = ChatModel(folder, GenerateOptions(), device=target.device, autocast=autocast_dtype("auto", target.device))
    generator = model.generator
    config = GenerationConfig(
        max_new_tokens=options.new_tokens, do_sample=False, use_cache=True, eos_token_id=list(generator.end_ids),
        pad_token_id=generator.tokenizer.pad_id, decoder_start_token_id=generator.start_id,
    )  # fmt: skip
    texts = questions()
    with target.enforce(simulate=False), torch.no_grad(), generator.autocast():
        for clients in options.clients:
            begin = time.monotonic() + options.warm_seconds
            figures, waiting = Figures(begin, begin + options.seconds), queue.SimpleQueue[tuple[float, int]]()
            for number in range(clients):
                waiting.put((time.monotonic(), number))
            while time.monotonic() < figures.ended_s:
                submitted, place = waiting.get()
                stream = _FirstToken()
                ids = torch.tensor(
                    [model.prompt([{"role": "user", "content": texts[place % len(texts)]}])], device=target.device
                )
                output = generator.model.generate(
                    input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config, streamer=stream
                )
                tokens = output.shape[1] - (ids.shape[1] if generator.causal else 1)
                figures.add(submitted, (stream.at or time.monotonic()) - submitted, int(tokens))
                waiting.put((time.monotonic(), place + clients))
            yield {"case": case, "entry": "one", "clients": clients, "device": options.device} | figures.to_json()


class _FirstToken:
    """A streamer that notes when the first new token came; what it is given first is the prompt."""

    def __init__(self) -> None:
        self.at: float | None = None
        self._calls = 0

    def put(self, value: Any) -> None:
        self._calls += 1
        if self._calls == 2:
            self.at = time.monotonic()

    def end(self) -> None:
        pass


def _serve_brimful(options: argparse.Namespace) -> None:
    """What `brimful serve` does, without the packages of the command line."""
    from brimful.planning.plan_options import PlanOptions
    from brimful.planning.target import autocast_dtype, find_target
    from brimful.serving.api import Api
    from brimful.serving.chat_model import ChatModel
    from brimful.serving.engine import Engine
    from brimful.serving.server import Server, ServerOptions, listen
    from brimful.tasks.generate import GenerateOptions

    listening = ServerOptions(port=options.port)
    listener = listen(listening)
    target = find_target(PlanOptions(device=options.device, memory_limit=options.memory_limit or None))
    defaults = GenerateOptions()
    model = ChatModel(options.process, defaults, device=target.device, autocast=autocast_dtype("auto", target.device))
    engine = Engine(model.generator, target).start()
    print(engine.choices, flush=True)
    try:
        Server(Api(model, engine, str(options.process), defaults), listening).run(listener)
    finally:
        engine.close()


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    listed = {"type": lambda text: text.split(",")}
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--memory-limit", help="such as 20GiB; default: what is free")
    parser.add_argument("--cases", default=list(CASES), **listed)
    parser.add_argument("--entries", default=["brimful", "transformers", "transformers-cb", "one"], **listed)
    parser.add_argument("--clients", default=[1, 8, 64], type=lambda text: [int(one) for one in text.split(",")])
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--warm-seconds", type=float, default=10.0)
    parser.add_argument(
        "--start-seconds", type=float, default=120.0, help="a server has not started that does not answer after these"
    )
    parser.add_argument("--output", type=Path, help="a .jsonl file that figures are appended to")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the table of such a file")
    parser.add_argument("--quick", action="store_true", help="tiny models, answers of 32 tokens, 5 s a point")
    parser.add_argument("--process", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.new_tokens, options.seconds, options.warm_seconds = 32, 5.0, 2.0
    return options


if __name__ == "__main__":
    main()
