#!/usr/bin/env python3
"""Hold the client of ``mxq eval`` against ``vllm bench serve`` on one server, into benchmarks/CLIENT.md.

    python tools/bench_client.py                             # in an environment that has vLLM's CPU build and pandas

Both send the same prompts in the same order, at the same concurrency, for answers of the same length, to a server of
testbed:dense that decodes plainly: a piece per token is the most that a client can get to do. They take turns, and the
one that begins changes with every pair; a ratio is that of one pair's passes. vLLM's tool stays loaded in a process of
its own, so that a turn of it costs no start.

It is measured twice. First client and server share the processors, so that a client that takes more of them has a
slower server. Then the server has half of them and the clients have the others: nothing can be taken from it, and what
is left of a difference is one of what they count. Both clients' shares are measured, from the first request sent to the
last answer ended. "others" is the share that neither had: where it is not small, the figures are of a busy machine and
a run says little.

    python tools/bench_client.py --pieces                    # no vLLM, a minute: what a piece costs the client

--pieces has a process of its own stream made-up pieces at --rate, and two clients take them in turn: the one that there
is, and one that takes each piece from aiohttp and reads it at once. On a busy machine both cost more; their ratio says
something still.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from mxq import files, testbed, workloads
from mxq.checkpoint import resolve
from mxq.engines.answers import Received
from mxq.engines.base import Sampling
from mxq.engines.builds import BUILDS, measurable
from mxq.engines.client import Client, Endpoint, connected
from mxq.engines.launch import Launch, Served, launch
from mxq.engines.process import free_port, program
from mxq.engines.server import serving
from mxq.errors import MxqError, UsageError
from mxq.evaluate.closed_loop import undisturbed
from mxq.progress import note
from mxq.workloads.chat import ChatTemplate

_PEER = """
import json, sys, time
from vllm.benchmarks import serve
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
serve.add_cli_args(parser)
spent = []  # of this process, as the first request is sent and after the last answer
def noting(function):
    def call(*args, **how):
        spent.append(time.process_time())
        return function(*args, **how)
    return call
serve.get_request, serve.calculate_metrics = noting(serve.get_request), noting(serve.calculate_metrics)
out, sys.stdout = sys.stdout, sys.stderr
for line in sys.stdin:
    said = serve.main(parser.parse_args(json.loads(line)))
    print(json.dumps(said | {"spent": spent[-1] - spent[-2]}), file=out, flush=True)
"""
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Load:
    """Requests of one pass: how many at once, how many in all, tokens of each answer."""

    concurrency: int
    requests: int
    tokens: int


@dataclass(frozen=True)
class Pass:
    """What one tool saw, in seconds; and what was seen of it.

    Attributes:
        cpu: share of one processor that the client had.
        reading_s: what it had after the last answer, to read what it had kept.
        server_s: processor time of the server.
        others: share of the machine's processors that neither had.
    """

    seconds: float
    tokens: int
    ttft: list[float]
    itl: list[float]
    cpu: float
    reading_s: float = 0.0
    server_s: float = 0.0
    others: float = 0.0

    @property
    def speed(self) -> float:
        """Output tokens per second of wall clock."""
        return self.tokens / self.seconds


def own(endpoint: Endpoint, prompts: Sequence[str], load: Load) -> Pass:
    """Send the prompts as ``mxq eval`` does."""

    async def run() -> Pass:
        async with connected(endpoint) as client:
            with undisturbed():
                begin, busy = time.perf_counter(), time.process_time()
                received = await asyncio.gather(*(ask(client, prompt, slots) for prompt in prompts))
                busy, seconds = time.process_time() - busy, time.perf_counter() - begin
        reading = time.process_time()
        answers = [one.answer() for one in received]
        reading = time.process_time() - reading
        return Pass(
            seconds,
            sum(answer.output_tokens for answer in answers),
            [answer.ttft_s for answer in answers],
            [gap for answer in answers for gap in answer.gaps_s],
            busy / seconds,
            reading,
        )

    async def ask(client: Client, prompt: str, slots: asyncio.Semaphore) -> Received:
        async with slots:
            return await client.receive(prompt, max_tokens=load.tokens, sampling=Sampling(), ignore_eos=True)

    slots = asyncio.Semaphore(load.concurrency)
    return asyncio.run(run())


@contextlib.contextmanager
def apart(launch: Launch) -> Iterator[Launch]:
    """Yield a launch on the first half of the processors, and leave this process and its children the other half."""
    all_of_them = sorted(os.sched_getaffinity(0))
    half = len(all_of_them) // 2
    if not half:
        raise UsageError("there is one processor, and two are needed", "measure elsewhere")
    served = ",".join(map(str, all_of_them[:half]))
    argv = ("taskset", "--cpu-list", served, program(launch.argv[0]), *launch.argv[1:])
    os.sched_setaffinity(0, all_of_them[half:])
    try:
        yield Launch(argv, {**launch.env, "VLLM_CPU_OMP_THREADS_BIND": served})
    finally:
        os.sched_setaffinity(0, all_of_them)


class UnansweredError(MxqError):
    """Requests of a pass failed, which now and then some of the peer's do: the pass is made again."""


class Peer:
    """``vllm bench serve``, loaded once."""

    def __init__(self, endpoint: Endpoint, target: Path, log: IO[bytes]) -> None:
        self._endpoint, self._target = endpoint, target
        command = [sys.executable, "-c", _PEER]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)

    def __call__(self, dataset: Path, load: Load) -> Pass:
        """Send the prompts of a file."""
        options = {
            "--backend": "vllm",
            "--base-url": self._endpoint.base_url,
            "--model": self._endpoint.model,
            "--tokenizer": str(self._target),
            "--dataset-name": "custom",
            "--dataset-path": str(dataset),
            "--num-prompts": str(load.requests),
            "--custom-output-len": str(load.tokens),
            "--max-concurrency": str(load.concurrency),
            "--temperature": "0",
        }
        flags = ["skip-chat-template", "disable-shuffle", "no-oversample", "ignore-eos", "disable-tqdm"]
        flags.append("save-detailed")  # or it leaves times out of what it returns
        words = [*(word for option in options.items() for word in option), *(f"--{flag}" for flag in flags)]
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(words) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise MxqError("vllm bench serve ended", "see the log; it needs pandas")
        said = json.loads(line)
        if said["completed"] != load.requests:
            lost = load.requests - said["completed"]
            raise UnansweredError(f"vllm bench serve: {lost} of {load.requests} requests unanswered", "see --log")
        itl = [gap for answer in said["itls"] for gap in answer]
        seconds = said["duration"]
        return Pass(seconds, said["total_output_tokens"], said["ttfts"], itl, said["spent"] / seconds)

    def close(self) -> None:
        """End it."""
        with self._process:
            assert self._process.stdin is not None
            self._process.stdin.close()


def answered(work: Callable[[], Pass], server: int, tries: int = 3) -> Pass:
    """Return the first pass in which every request was answered."""
    for left in reversed(range(tries)):
        try:
            return observed(work, server)
        except UnansweredError as error:
            if not left:
                raise
            note(f"{error.message}: once more")
    raise AssertionError("no try at all")


def observed(work: Callable[[], Pass], server: int) -> Pass:
    """Return a pass with what the server, a process group, had meanwhile, and what others had."""
    begin = (time.perf_counter(), _machine_busy(), _group_busy(server), _group_busy(os.getpgrp()))
    made = work()
    end = (time.perf_counter(), _machine_busy(), _group_busy(server), _group_busy(os.getpgrp()))
    seconds, machine, served, clients = (b - a for a, b in zip(begin, end, strict=True))
    others = max(machine - served - clients, 0.0) / (seconds * (os.cpu_count() or 1))
    return dataclasses.replace(made, server_s=served, others=others)


def _machine_busy() -> float:
    """Return the seconds that all processors have been busy since the start of the machine."""
    user, nice, system, _, _, irq, soft, steal, *_ = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:])
    return (user + nice + system + irq + soft + steal) * _TICK_S


def _group_busy(group: int) -> float:
    """Return the seconds that the processes of a group have been busy."""
    ticks = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[2]) == group:
                    ticks += int(fields[11]) + int(fields[12])
    return ticks * _TICK_S


def measure(endpoint: Endpoint, peer: Peer, prompts: list[str], load: Load, pairs: int) -> list[dict[str, Pass]]:
    """Return what both tools saw, pair by pair."""
    assert endpoint.process is not None
    server, found = endpoint.process.group, []
    sent = [prompts[i % len(prompts)] for i in range(load.requests)]
    with tempfile.TemporaryDirectory() as temporary:
        dataset = Path(temporary) / "prompts.jsonl"
        dataset.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in sent))
        tools = {"mxq": lambda: own(endpoint, sent, load), "vllm": lambda: peer(dataset, load)}
        own(endpoint, sent, load)  # the server meets a batch of this size, and its answers' lengths
        for number in range(pairs):
            order = list(tools) if number % 2 == 0 else list(tools)[::-1]
            found.append({name: answered(tools[name], server) for name in order})
            speeds = ", ".join(f"{name} {found[-1][name].speed:.1f}" for name in tools)
            note(f"concurrency {load.concurrency}, pair {number + 1} of {pairs}: {speeds} tokens/s")
    return found


def compared(
    options: argparse.Namespace, placed: Callable[[Launch], contextlib.AbstractContextManager[Launch]]
) -> tuple[str | None, list[str]]:
    """Return vLLM's version and the table's rows, of a server that is started as ``placed`` says."""
    target = resolve(f"{testbed.PREFIX}dense")
    template = ChatTemplate(target, thinking=False)
    prompts = [template.text(prompt.messages) for name in testbed.WORKLOADS for prompt in workloads.load(name).prompts]
    started = measurable(launch("cpu", Served(str(target)), port=free_port()), None)
    table: list[str] = []
    with tempfile.TemporaryDirectory() as temporary:
        log = options.log or Path(temporary) / "log"
        note("starting the server")
        with (
            log.open("ab") as stream,
            placed(started) as made,
            serving(made, str(target), log, ready_s=BUILDS["cpu"].ready_s) as endpoint,
            contextlib.closing(Peer(endpoint, target, stream)) as peer,
        ):
            for concurrency in options.concurrency:
                # Alone, one request after the other would take as long as many at once.
                load = Load(concurrency, max(options.requests * concurrency, 24), options.tokens)
                table += rows(load, measure(endpoint, peer, prompts, load, options.pairs))
            return endpoint.version, table


def rows(load: Load, pairs: list[dict[str, Pass]]) -> Iterator[str]:
    """Yield the table's rows for one concurrency."""
    ratios = [pair["mxq"].speed / pair["vllm"].speed for pair in pairs]
    for name, title in (("mxq", "mxq"), ("vllm", "vllm bench serve")):
        runs = [pair[name] for pair in pairs]
        mine = name == "mxq"
        pieces = sum(len(run.itl) + len(run.ttft) for run in runs)
        busy = sum(run.cpu * run.seconds for run in runs)
        cells = [
            str(load.concurrency) if mine else "",
            title,
            f"{load.requests} x {load.tokens}" if mine else "",
            spread([run.speed for run in runs], "{:.1f}"),
            spread(ratios, "{:.3f}") if mine else "",
            spread([100 * run.cpu for run in runs], "{:.1f} %"),
            f"{1e6 * busy / pieces:.0f}",
            f"{1e6 * sum(run.reading_s for run in runs) / pieces:.0f}" if mine else "",
            f"{1e3 * statistics.median(t for run in runs for t in run.ttft):.1f}",
            f"{1e3 * statistics.median(t for run in runs for t in run.itl):.2f}",
            spread([1e3 * run.server_s / run.tokens for run in runs], "{:.2f}"),
            spread([100 * run.others for run in runs], "{:.0f} %"),
        ]
        yield f"| {' | '.join(cells)} |"


def spread(values: Sequence[float], form: str) -> str:
    """Return the median with the range."""
    low, middle, high = (form.format(f(values)) for f in (min, statistics.median, max))
    return f"{middle} ({low}–{high})"


_STREAM = """
import asyncio, json, sys, time
streams, interval = [], float(sys.argv[1])
async def serve(reader, writer):
    try:
        while True:
            head = await reader.readuntil(b"\\r\\n\\r\\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\\r\\n")[0])
            tokens = json.loads(await reader.readexactly(length))["max_tokens"]
            writer.write(b"HTTP/1.1 200 OK\\r\\ntransfer-encoding: chunked\\r\\n\\r\\n")
            over = asyncio.get_running_loop().create_future()
            streams.append([writer, tokens, over])
            await over
    except (OSError, asyncio.IncompleteReadError):
        writer.close()
def chunk(event):
    data = b"data: " + event + b"\\n\\n"
    return f"{len(data):x}\\r\\n".encode() + data + b"\\r\\n"
def event(token, reason, usage=None):
    choice = {"index": 0, "text": " word", "logprobs": None, "finish_reason": reason, "stop_reason": None,
              "token_ids": [token], "prompt_logprobs": None, "prompt_token_ids": None}
    return json.dumps({"id": "cmpl-a01b2c3d4e5f60718293a4b5c6d7e8f9", "object": "text_completion",
                       "created": 1796061922, "model": "testbed:dense", "choices": [] if usage else [choice],
                       "usage": usage}).encode()
async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    at = time.perf_counter()
    while True:  # one piece to each stream, as a step of an engine gives it
        at = max(at + interval, time.perf_counter())
        await asyncio.sleep(at - time.perf_counter())
        for stream in list(streams):
            writer, left, over = stream
            stream[1] -= 1
            writer.write(chunk(event(1000 + left, None if left > 1 else "length")))
            if left == 1:
                usage = {"prompt_tokens": 5, "completion_tokens": json.loads(sys.argv[2])}
                writer.write(chunk(event(0, None, usage)) + chunk(b"[DONE]") + b"0\\r\\n\\r\\n")
                streams.remove(stream)
                over.set_result(None)
asyncio.run(main())
"""


def pieces(load: Load, rate: float, pairs: int) -> None:
    """Print what a piece costs the client, and one that takes each from aiohttp."""
    from unittest.mock import patch

    from mxq.engines import stream

    bytes(1 << 24)  # freed: what asyncio reads into is not mapped anew for each piece
    command = [sys.executable, "-c", _STREAM, str(load.concurrency / rate), str(load.tokens)]
    none, costs = lambda *_: None, dict[str, list[float]](kept=[], each=[])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        endpoint = Endpoint(f"http://127.0.0.1:{int(server.stdout.readline())}", "m", local=True)
        try:
            for number in range(pairs + 1):
                for name in list(costs)[:: 1 if number % 2 else -1]:
                    with contextlib.nullcontext() if name == "kept" else patch.object(stream.Ears, "tap", none):
                        made = own(endpoint, ["x"] * load.requests, load)
                    if number:
                        costs[name].append(1e6 * made.cpu * made.seconds / made.tokens)
        finally:
            server.kill()
    ratios = [each / one for each, one in zip(costs["each"], costs["kept"], strict=True)]
    for name, title in (("kept", "kept as it comes"), ("each", "taken from aiohttp and read")):
        share = statistics.median(costs[name]) * rate / 1e4
        print(f"a piece {title}: {spread(costs[name], '{:.1f}')} µs, {share:.1f} % of a processor at {rate:g}/s")
    print(f"ratio: {spread(ratios, '{:.2f}')}; {pairs} pairs, load average {os.getloadavg()[0]:.1f}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and write its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--pairs", type=int, default=7, help="passes of each tool")
    parser.add_argument("--requests", type=int, default=12, help="requests of a pass, times the concurrency")
    parser.add_argument("--tokens", type=int, default=64, help="length of an answer")
    parser.add_argument("--log", type=Path, help="keep here what server and peer print")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/CLIENT.md"))
    parser.add_argument("--pieces", action="store_true", help="only what a piece costs; needs no vLLM")
    parser.add_argument("--rate", type=float, default=3300, help="pieces a second of --pieces")
    options = parser.parse_args(argv)
    if options.pieces:
        most = max(options.concurrency)
        pieces(Load(most, options.requests * most, options.tokens), options.rate, options.pairs)
        return 0
    begin = os.getloadavg()[0]
    version, together = compared(options, contextlib.nullcontext)
    _, separate = compared(options, apart)
    hardware = files.hardware()
    head = [
        "# The client, beside `vllm bench serve`",
        "",
        f"`{shlex.join(['python', 'tools/bench_client.py', *(sys.argv[1:] if argv is None else argv)])}`",
        "",
        f"{hardware['cpu']}, {hardware['cores']} cores, load average {begin:.1f} before and {os.getloadavg()[0]:.1f} "
        f"after; vLLM {version}, "
        + ", ".join(f"{name} {number}" for name, number in files.versions("torch", "aiohttp").items()),
        "",
        f"testbed:dense, plain decoding, greedy, every answer of full length, the same prompts in the same order; "
        f"{options.pairs} pairs of passes, alternated: median (lowest–highest). The ratio is of the two passes of a "
        "pair. A client's own time is that of all its threads, over wall clock, from the first request sent to the "
        "last answer ended; a piece is an event with a token, and mxq reads what it kept of it after that. Others had "
        "what neither server nor client had.",
        "",
        "Both clocks run from before the first request is made until the last answer has ended; both have as many "
        "requests in flight, and send the next one as one ends. They differ in what they cost: vLLM's client reads the "
        "JSON of most pieces twice as they come and looks for a proxy in a thread for each request. Requests that "
        "vLLM's loses are not in its sums: such a pass is made again.",
        "",
    ]
    columns = [
        "| concurrency | tool | requests x tokens | tokens/s | mxq / bench (must: 1 ± 0.03) "
        "| client's CPU (must at 32: under 5 %) | µs of it per piece | µs later | TTFT ms | ITL ms "
        "| server's CPU, ms per token | others |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    text = [
        *head,
        "## The server on half of the processors, the clients on the others",
        "",
        "What a client costs the server does not have to do without: the ratio says whether both count the same.",
        "",
        *columns,
        *separate,
        "",
        "## Server and clients on all of them",
        "",
        "Where they are busy, what a client takes the server lacks, and passes vary more.",
        "",
        *columns,
        *together,
    ]
    with files.atomic_write(options.out) as file:
        file.write("\n".join(text) + "\n")
    print("\n".join([*separate, "", *together]))
    note(f"written to {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
