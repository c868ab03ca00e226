"""vLLM servers: started here for the time of a block, or found running.

::

    launch.Launch -> serving() -> Endpoint -> client.connected() -> Client -> answers.Answer
    URL, model    -> attached() ->                               -> metrics.Counters
"""

import asyncio
import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from mxq.engines.answers import quoted_text
from mxq.engines.client import KEY, Client, Endpoint, Timeouts, connected, root_of
from mxq.engines.launch import Launch
from mxq.engines.process import ServerError, ServerProcess, check_free, started
from mxq.errors import UsageError

_LOOK_S = 0.2
_TIMEOUTS = Timeouts(connect_s=5.0, silence_s=10.0, answer_s=30.0)


@contextlib.contextmanager
def serving(
    launch: Launch, model: str, log: Path, *, ready_s: float, given_up: Callable[[], bool] = lambda: False
) -> Iterator[Endpoint]:
    """Start a server, wait until it is ready, and end it with the block, with all of its processes.

    Args:
        launch: the command, which has ``--host`` and ``--port``.
        model: the name that it serves the model under.
        log: what it prints is appended to this file.
        ready_s: how long the start may take: :data:`mxq.engines.builds.BUILDS`.
        given_up: asked while it starts, for a thread that no signal reaches.

    Raises:
        UsageError: no such program, or the port is taken.
        ServerError: it ended, or was not ready in time; the line of its log that says why is quoted.
    """
    host, port = (_option(launch, name) for name in ("--host", "--port"))
    check_free(host, int(port))
    with started(launch.argv, launch.env, log) as process:
        key = launch.env.get(KEY, os.environ.get(KEY))
        endpoint = Endpoint(f"http://{host}:{port}", model, key=key, local=True, process=process)
        yield asyncio.run(_ready(endpoint, process, ready_s, given_up))


def attached(base_url: str, model: str) -> Endpoint:
    """Return a server that runs already, once it is seen to serve ``model``; its key is in the environment.

    Args:
        base_url: with ``/v1`` or without.
        model: the name that it serves the model under.

    Raises:
        UsageError: it serves other models.
        ServerError: it does not answer, or not as vLLM; or it caches prefixes, and a prompt is to be measured twice.
    """
    return asyncio.run(_attached(Endpoint(root_of(base_url), model, key=os.environ.get(KEY))))


async def _attached(endpoint: Endpoint) -> Endpoint:
    endpoint = await _checked(endpoint)
    caching = None
    async with connected(endpoint, _TIMEOUTS) as client:
        with contextlib.suppress(ServerError):  # one without counts is refused where they are wanted
            caching = await client.caches_prefixes()
    if caching:
        raise ServerError(f"{endpoint.base_url} caches prefixes", "start it with --no-enable-prefix-caching")
    return endpoint


async def _ready(endpoint: Endpoint, process: ServerProcess, ready_s: float, given_up: Callable[[], bool]) -> Endpoint:
    deadline = time.monotonic() + ready_s
    async with connected(endpoint, _TIMEOUTS) as client:
        while not await client.healthy():
            process.check()
            if given_up():
                raise ServerError("the start of the server was given up")
            if time.monotonic() > deadline:
                raise process.failure(f"the server was not ready after {ready_s:g} s")
            await asyncio.sleep(_LOOK_S)
    process.check()
    return await _checked(endpoint)


async def _checked(endpoint: Endpoint) -> Endpoint:
    """Return the endpoint with what the server says of itself, once it is seen to serve the model."""
    async with connected(endpoint, _TIMEOUTS) as client:
        models = (await client.get_json("/v1/models")).get("data")
        entries = models if isinstance(models, list) else []
        roots = {str(entry.get("id")): entry.get("root") for entry in entries if isinstance(entry, dict)}
        if endpoint.model not in roots:
            served = ", ".join(quoted_text(name) for name in list(roots)[:8]) or "nothing"
            raise UsageError(f"{endpoint.base_url} serves {served}, not {endpoint.model}", "name what it serves")
        root = roots[endpoint.model]
        said = quoted_text(root) if isinstance(root, str) else None
        return dataclasses.replace(endpoint, version=await _version(client), root=said)


async def _version(client: Client) -> str | None:
    with contextlib.suppress(ServerError):
        version = (await client.get_json("/version")).get("version")
        return quoted_text(version) if isinstance(version, str) else None
    return None


def _option(launch: Launch, name: str) -> str:
    for word, value in zip(launch.argv, [*launch.argv[1:], ""], strict=True):
        if word == name:
            return value
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    raise AssertionError(f"a launch without {name}")
