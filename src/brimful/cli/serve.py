"""`brimful serve MODEL`: the OpenAI API and a page to talk to the model."""

import os
import sys
from pathlib import Path
from typing import Literal

from brimful.cli.flags import Device, Fill, Switch
from brimful.cli.output import prefer_growing_segments, progress, show, with_flags
from brimful.languages import language, tr, translate
from brimful.units import parse_bytes


def serve(
    model: str,
    /,
    *,
    name: str | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    token: str | None = None,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_p: float = 1.0,
    context: int | None = None,
    max_batch: int | None = None,
    max_queue: int = 256,
    max_wait: float = 60.0,
    max_body: str = "4MiB",
    grace: float = 30.0,
    cuda_graphs: Literal["auto", "on", "off"] = "auto",
    log_requests: Switch = False,
    device: Device = "auto",
    memory_limit: str | None = None,
    fill: Fill = 0.85,
    json: Switch = False,
) -> None:
    """Serve a language model: the OpenAI API, and a page to talk to it.

    Requests that come at the same time are answered together, as many as fit the memory by prediction; others wait. If memory
    runs out all the same, the batch gets smaller and the answers stay the same.

    Parameters
    ----------
    model
        A run of `brimful train` (its best model), one of its checkpoints, an adapter, a folder written by save_pretrained, or
        owner/name on the Hugging Face hub.
    name
        The name that clients use. Default: that of the folder.
    host
        Address to listen on. Beyond this machine, --token is required.
    port
        Port to listen on; 0 takes a free one.
    token
        What clients send as `Authorization: Bearer TOKEN`. Default: BRIMFUL_TOKEN of the environment.
    max_new_tokens
        Tokens of an answer at most, if the request names no number.
    temperature
        Sampling temperature, if the request names none; 0 always takes the most likely token.
    top_p
        Sample only from the most likely tokens that together have this probability, if the request names no number.
    context
        Tokens of prompt and answer at most; of an encoder-decoder, of the prompt. Default: the model's.
    max_batch
        Requests that are answered at once at most. Default: what fits.
    max_queue
        Requests that wait at most. Others get status 429.
    max_wait
        Seconds that a request waits at most before it gets status 429.
    max_body
        Size of a request at most.
    grace
        Seconds to finish requests after SIGTERM.
    cuda_graphs
        Compute each token with one CUDA graph instead of launching it; auto does so where that is faster.
    log_requests
        Print requests and answers. Without it no content is logged.
    memory_limit
        Memory to use at most, such as 20GiB: reserved bytes on a GPU, a simulated limit on the CPU. Default: what is free.
    json
        Print one JSON object when the server is ready.
    """
    prefer_growing_segments()
    from brimful.serving.server import Server, ServerOptions, listen

    options = ServerOptions(
        host=host, port=port, token=token or os.environ.get("BRIMFUL_TOKEN") or None, grace_s=grace,
        max_body_bytes=parse_bytes(max_body, flag="--max-body"), log_requests=log_requests,
    )  # fmt: skip
    from brimful.planning.plan_options import PlanOptions
    from brimful.planning.target import autocast_dtype, find_target
    from brimful.serving.api import Api
    from brimful.serving.chat_model import ChatModel
    from brimful.serving.engine import Engine, EngineOptions
    from brimful.tasks.generate import GenerateOptions

    defaults = GenerateOptions(max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p)
    limits = EngineOptions(
        max_batch=max_batch, max_queue=max_queue, max_wait_s=max_wait, context=context, cuda_graphs=cuda_graphs
    )
    plan = PlanOptions(device=device, memory_limit=memory_limit, fill=fill)
    listener = listen(options)
    try:
        with progress("serve") as show_progress:
            target = find_target(plan)
            show_progress("loading the model")
            loaded = ChatModel(model, defaults, device=target.device, autocast=autocast_dtype("auto", target.device))
            show_progress("measuring memory")
            note = lambda text: print(with_flags(translate(text)), file=sys.stderr, flush=True)  # noqa: E731
            engine = Engine(loaded.generator, target, limits, note=note).start()
        name = name or model_name(model)
        server = Server(Api(loaded, engine, name, defaults), options)
        url = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
        choices = {key: {"value": value, "reason": reason} for key, (value, reason) in engine.choices.items()}
        ready = {
            "url": url, "model": name, "kind": loaded.manner, "device": str(target.device), "choices": choices,
            "context_length": engine.context_tokens, "limit_bytes": target.limit_bytes, "limit_reason": target.limit_reason,
        }  # fmt: skip
        lines = [tr("{model} on {device}: {url}", model=name, device=translate(target.name), url=url)]
        colon = "：" if language() == "zh" else ": "
        lines += [f"  {translate(value)}{colon}{translate(reason)}" for value, reason in engine.choices.values()]
        try:
            server.run(listener, lambda: show("\n".join(lines), ready, as_json=json))
        finally:
            engine.close()
    finally:
        listener.close()


def model_name(model: str) -> str:
    """The name of a folder, or owner/name of the hub as it is. Of RUN/checkpoints/step-…/model the part that tells it apart."""
    path = Path(model).expanduser()
    if not path.exists():
        return model
    parts = [part for part in path.resolve().parts if part not in ("model", "best", "checkpoints", "/")]
    return parts[-1] if parts else "model"
