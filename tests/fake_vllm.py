#!/usr/bin/env python3
"""A server that speaks vLLM's protocol, and fails as it is told: a stand-in for ``vllm serve``.

What happens at the start is in the variable FAKE_VLLM, what happens to a request in its prompt. The passes of every
answer are those of :data:`PASSES`; tokens are 100, 101, 102, ...

With the word ``answers``, prompts of token ids are answered one by one: each token follows from all before it, and says
nothing else than a model would. FAKE_VLLM_DIR then has a line of ``starts`` for each start, and of ``requests.jsonl``
for each request. ``NAME@N#S`` plants what a prompt NAME would do into the N-th request of the S-th start, and a word of
the start followed by ``#S`` happens in the S-th only. ``parts`` lets speculation part from plain answers by a near tie.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PASSES = [(3, 3), (0, 3), (2, 3), (3, 3)]
"""Accepted and drafted. With the prefill's token, 1 + 4 + 8 = 13 tokens."""
HISTOGRAM = [1, 0, 1, 2]
TOKENS = list(range(100, 113))
SPLIT = [1, 4, 1, 3, 4]

served: list[int] = []
counted = {"drafts": 0, "draft_tokens": 0, "accepted_tokens": 0}
positions = [0] * 64
totals = {"tokens": 0, "requests": 0, "running": 0, "dead": 0}


def option(name: str) -> str | None:
    """Return the value of an option of the command line."""
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else None


MODEL = option("--served-model-name") or (sys.argv[2] if __name__ == "__main__" else "")
LONGEST = 12 if "short" in os.environ.get("FAKE_VLLM", "") else 400
KEY = os.environ.get("VLLM_API_KEY")
SPECULATIVE = "--speculative-config" in sys.argv
DIRECTORY = Path(os.environ["FAKE_VLLM_DIR"]) if "FAKE_VLLM_DIR" in os.environ else None


def started() -> int:
    """Count this start, and return which one it is."""
    if DIRECTORY is None or __name__ != "__main__":
        return 1
    with (DIRECTORY / "starts").open("a") as stream:
        stream.write(" ".join(sys.argv[1:]) + "\n")
    return len((DIRECTORY / "starts").read_text().splitlines())


START = started()
HOW = [
    word.partition("#")[0]
    for word in os.environ.get("FAKE_VLLM", "").split()
    if word.endswith(f"#{START}") or "#" not in word
]
PLANTED = {int(at): name.replace("-", " ") for name, _, at in (word.partition("@") for word in HOW) if at}
K = json.loads(option("--speculative-config") or "{}").get("num_speculative_tokens", 0)
totals["running"] += "busy" in HOW  # a request of somebody else's
DETAILED = "--per-request-spec-decode-metrics" in sys.argv


def metrics() -> str:
    """Return what /metrics answers."""
    label = f'engine="0",model_name="{MODEL}"'
    lines = [
        "# HELP vllm:num_requests_running Number of requests in model execution batches.",
        "# TYPE vllm:num_requests_running gauge",
        f"vllm:num_requests_running{{{label}}} {totals['running']}.0",
        f"vllm:num_requests_waiting{{{label}}} 0.0",
        "# TYPE vllm:generation_tokens_total counter",
        f"vllm:generation_tokens_total{{{label}}} {totals['tokens']}.0",
        "# TYPE vllm:generation_tokens_created gauge",
        f"vllm:generation_tokens_created{{{label}}} 1.7960619229316576e+09",
        "# TYPE vllm:cache_config_info gauge",
        f'vllm:cache_config_info{{block_size="16",enable_prefix_caching="{"caching" in HOW}",engine="0"}} 1.0',
        f'vllm:request_success_total{{{label},finished_reason="stop"}} 0.0',
        f'vllm:request_success_total{{{label},finished_reason="length"}} {totals["requests"]}.0',
    ]
    if SPECULATIVE:
        lines += [f"vllm:spec_decode_num_{name}_total{{{label}}} {value}.0" for name, value in counted.items()]
        for position, value in enumerate(positions[: K or 3]):
            name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
            lines.append(f'{name}{{{label},position="{position}"}} {value}.0')
    return "\n".join(lines) + "\n"


def count(tokens: int = len(TOKENS), passes: Sequence[tuple[int, int]] = tuple(PASSES)) -> None:
    """Count one answer."""
    totals["tokens"] += tokens
    totals["requests"] += 1
    for accepted, drafted in passes if SPECULATIVE else ():
        counted["drafts"] += 1
        counted["draft_tokens"] += drafted
        counted["accepted_tokens"] += accepted
        for position in range(accepted):
            positions[position] += 1


def events(chat: bool) -> list[dict[str, Any]]:
    """Return the events of an answer."""
    made: list[dict[str, Any]] = []
    if chat:
        made.append({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    begin = 0
    for size in SPLIT if SPECULATIVE else [1] * len(TOKENS):
        ids = TOKENS[begin : begin + size]
        begin += size
        text = "".join(f" {token}" for token in ids)
        reason = "length" if begin == len(TOKENS) else None
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason, "token_ids": ids}
        made.append({"choices": [choice | ({"delta": {"content": text}} if chat else {"text": text})]})
    usage = {"prompt_tokens": 5, "completion_tokens": len(TOKENS), "total_tokens": 5 + len(TOKENS)}
    last: dict[str, Any] = {"choices": [], "usage": usage}
    if DETAILED:
        speculation = {
            "acceptance_histogram": HISTOGRAM,
            "num_spec_steps": 4,
            "num_accepted_draft_tokens": 8,
            "num_draft_tokens": 12,
            "num_spec_tokens": 3,
            "per_step_accepted": [accepted for accepted, _ in PASSES],
            "per_step_drafted": [drafted for _, drafted in PASSES],
        }
        last["metrics"] = {"speculative_decoding": speculation}
    return [*made, last]


def likeliest(ids: Sequence[int]) -> int:
    """Return the token that follows a sequence; the next larger one is nearly as likely."""
    return 10 + zlib.crc32(str(list(ids)).encode()) % 190


def answered(body: dict[str, Any]) -> tuple[list[dict[str, Any]], int, list[tuple[int, int]]]:
    """Return events, number of tokens and passes of an answer to token ids."""
    prompt, limit, stop = body["prompt"], body["max_tokens"], body.get("stop_token_ids") or []
    tokens: list[int] = []
    while len(tokens) < limit and not (tokens and tokens[-1] in stop):
        token = likeliest([*prompt, *tokens])
        if "parts" in HOW and SPECULATIVE and len(tokens) == 4 and token % 3 == 0:
            token += 1
        tokens.append(stop[0] if stop and token % 16 == 0 and len(tokens) > 5 else token)
    passes: list[tuple[int, int]] = []
    sizes = [1]
    while sum(sizes) < len(tokens):
        accepted = zlib.crc32(str([K, *prompt, sum(sizes)]).encode()) % (K + 1)
        passes += [(accepted, K)] if K else []
        sizes.append(min(accepted + 1, len(tokens) - sum(sizes)))
    made: list[dict[str, Any]] = []
    for end in (sum(sizes[: i + 1]) for i in range(len(sizes))):
        ids = tokens[end - sizes[len(made)] : end]
        reason = None if end < len(tokens) else "stop" if tokens[-1] in stop else "length"
        made.append({"choices": [{"index": 0, "finish_reason": reason, "token_ids": ids, "text": " x" * len(ids)}]})
    last: dict[str, Any] = {"choices": [], "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(tokens)}}
    if DETAILED:
        said = {
            "acceptance_histogram": [sum(accepted == n for accepted, _ in passes) for n in range(K + 1)],
            "num_spec_steps": len(passes),
            "num_accepted_draft_tokens": sum(accepted for accepted, _ in passes),
            "num_draft_tokens": K * len(passes),
            "per_step_accepted": [accepted for accepted, _ in passes],
            "per_step_drafted": [K] * len(passes),
        }
        last["metrics"] = {"speculative_decoding": said}
    return [*made, last], len(tokens), passes


def likely(body: dict[str, Any]) -> str:
    """Return what is said of the tokens that may follow a prompt."""
    token = likeliest(body["prompt"])
    found = {token: -0.7, token + 1: -0.71, token + 2: -4.0}
    top = {f"token_id:{name}": value for name, value in found.items()}
    return json.dumps({"choices": [{"token_ids": [token], "logprobs": {"top_logprobs": [top]}}]})


def harness(body: dict[str, Any]) -> str:
    """Return what lm-eval is answered: how likely the tokens of prompts are, or a short text.

    A quantized model says something else to every other prompt.
    """
    config = Path(sys.argv[2], "config.json")
    quantized = config.exists() and "quantization_config" in config.read_text()
    choices: list[dict[str, Any]] = []
    for number, prompt in enumerate(body["prompt"]):
        salt = quantized and zlib.crc32(str(prompt).encode()) % 2 == 0
        sums = [zlib.crc32(str([salt, prompt[: end + 1]]).encode()) for end in range(len(prompt) + 1)]
        text = {"index": number, "text": f"{sums[-1] % 2}."}
        if body.get("echo") and "no-echo" not in HOW:
            values = [None, *(-0.01 - total % 1000 / 100 for total in sums[1:])]
            tops = [None, *({"x": -0.01, "y": value} for value in values[1:])]
            text["logprobs"] = {"token_logprobs": values, "top_logprobs": tops}
        choices.append(text)
    if DIRECTORY is not None:
        with (DIRECTORY / "asked.jsonl").open("a") as stream:
            stream.write(json.dumps({"start": START, **body}) + "\n")
    return json.dumps({"choices": choices})


async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    """Answer a request as its prompt says."""
    chat = "messages" in body
    how = body["messages"][-1]["content"] if chat else body["prompt"]
    if isinstance(how, list) and how and isinstance(how[0], list):
        return send(writer, 500 if "no-harness" in HOW else 200, harness(body))
    by_ids = "answers" in HOW and not chat and isinstance(how, list)
    if by_ids and "logprobs" in body and "dies-of-likelihoods" in HOW:
        os.kill(os.getpid(), signal.SIGKILL)
    if by_ids and "logprobs" in body:
        return send(writer, 404 if "silent-likelihoods" in HOW else 200, likely(body))
    if by_ids:
        served.append(1)
        how = PLANTED.get(len(served), "")
        if DIRECTORY is not None:
            with (DIRECTORY / "requests.jsonl").open("a") as stream:
                about = {"start": START, "running": totals["running"], "seed": body["seed"]}
                stream.write(json.dumps(about | {"prompt": body["prompt"], "limit": body["max_tokens"]}) + "\n")
    if body["model"] != MODEL:
        return send(writer, 404, json.dumps({"error": {"message": f"The model `{body['model']}` does not exist."}}))
    if how in ("500", "429", "503"):
        return send(writer, int(how), json.dumps({"error": {"message": "as it was\nasked", "code": int(how)}}))
    if how == "closes":
        writer.transport.abort()
        return None
    if how == "reset":
        totals.update(tokens=0, requests=0)
    if how == "silent":
        await asyncio.sleep(60)
    if body.get("stream") is False:
        return send(writer, 200, "[]" if how == "odd" else json.dumps({"choices": [{"token_ids": TOKENS}]}))
    made, tokens, passes = answered(body) if by_ids else (events(chat), len(TOKENS), PASSES)
    if how == "miscounted":
        made[-1]["usage"]["completion_tokens"] += 1
    if how == "uncounted":
        del made[-1]["usage"]
    if how == "contradicting":
        made[-1]["metrics"]["speculative_decoding"]["num_spec_steps"] = 5
    if how == "endless":
        made[3:3] = made[2:3] * 20
    if how == "engine dies":
        totals["dead"] = 1
        log("ERROR", "EngineCore encountered a fatal error.", "ValueError: planted in the engine")
    if how in ("gives up", "engine dies"):
        made[1 if by_ids else 3 :] = [{"error": {"message": "EngineCore encountered an issue.", "code": 500}}]
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
    totals["running"] += 1
    for number, event in enumerate(made):
        data = f"data: {json.dumps(event)}\n\n".encode()
        at = min(3, len(made) - 1)
        if number == at and how == "broken":
            data = data[:30] + b"\n\n"
        if number == at and how == "cut":
            data, how = data[:30], "cut now"
        chunk(writer, data)
        await writer.drain()
        if how == "cut now":
            writer.transport.abort()
            return None
        if number == at and how == "dies":
            log("ERROR", "EngineCore encountered a fatal error.", "ValueError: planted")
            os.kill(os.getpid(), signal.SIGKILL)
        if number == at and how == "stalls":
            await asyncio.sleep(60)
        await asyncio.sleep(float(os.environ.get("FAKE_VLLM_PAUSE", "0.005")))
    totals["running"] -= 1
    count(tokens, passes)
    if how != "unfinished":
        chunk(writer, b"data: [DONE]\n\n")
    chunk(writer, b"")
    return None


def chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Write a piece of a body."""
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


def send(writer: asyncio.StreamWriter, status: int, text: str) -> None:
    """Write a whole answer."""
    data = text.encode()
    writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer the requests of one connection."""
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
            fields = dict(line.split(": ", 1) for line in head[1:] if line)
            data = await reader.readexactly(int(fields.get("content-length", 0)))
            path = head[0].split()[1]
            if path == "/health":
                send(writer, 503 if totals["dead"] or time.monotonic() < ready_at else 200, "")
            elif KEY is not None and fields.get("authorization") != f"bearer {KEY}".lower():
                send(writer, 401, '{"error": "Unauthorized"}')
            elif path == "/version":
                send(writer, 200, '{"version": "0.32.0"}')
            elif path == "/v1/models":
                card = {"id": MODEL, "root": sys.argv[2], "max_model_len": LONGEST}
                send(writer, 200, json.dumps({"object": "list", "data": [card]}))
            elif path == "/metrics":
                send(writer, 404 if "uncounting" in HOW else 200, metrics())
            else:
                await answer(json.loads(data), writer)
            await writer.drain()
    writer.close()


def log(level: str, *messages: str) -> None:
    """Print as vLLM's logger does."""
    for message in messages:
        print(f"(APIServer pid={os.getpid()}) {level} 11-30 18:10:36 [core.py:1510] {message}", flush=True)


async def main() -> None:
    """Start as FAKE_VLLM says, then serve."""
    log("INFO", "vLLM server version 0.32.0, serving model " + MODEL, *os.environ.get("FAKE_VLLM_LOG", "").splitlines())
    if "memory" in HOW:
        text = "Available memory on node 0 (21.19/23.54 GiB) is less than requested memory for kv (400.0 GiB)."
        log("ERROR", f"ValueError: {text}", f"RuntimeError: Worker failed with error '{text}'")
        sys.exit("RuntimeError: Engine core initialization failed. See root cause above.")
    if "options" in HOW:
        print("usage: vllm [OPTIONS]\nvllm: error: unrecognized arguments: --nonsense")
        sys.exit(2)
    if "slow" in HOW:
        log("INFO", "Loading weights took 3.00 seconds")
    if "family" in HOW:
        # A worker that ignores SIGTERM, and one that has left the process group.
        stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
        family = [
            subprocess.Popen([sys.executable, "-c", stubborn]).pid,
            subprocess.Popen([sys.executable, "-c", stubborn], start_new_session=True).pid,
        ]
        print("family", os.getpid(), *family, flush=True)
        if "deaf" in HOW:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
    server = await asyncio.start_server(serve, option("--host"), int(option("--port") or 0))
    await server.serve_forever()


ready_at = time.monotonic() + (60 if "slow" in HOW else 0)
if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main())
