"""A server of an evaluation as a model of lm-eval's: its ``local-completions``, with what that leaves open decided."""

import asyncio
import contextlib
import copy
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mxq.engines.client import NEUTRAL, Client, Endpoint, Timeouts, connected
from mxq.engines.process import ServerError
from mxq.errors import MxqError
from mxq.progress import progress

_TIMEOUTS = Timeouts(silence_s=3600.0, answer_s=3600.0)
_TRIES = 4
_BACKOFF_S = 2.0
_LATER = (429, 503)


def served_model(endpoint: Endpoint, tokenizer: Path, *, longest: int, concurrency: int, thinking: bool) -> Any:
    """Return a server as lm-eval asks one.

    Prompts are sent as token ids of the target's own tokenizer, by mxq's client. lm-eval cuts off the beginning of a
    prompt that is too long, often without a word; here that is an error. What the model's generation_config.json has is
    neutral, as in all that is measured, and the thinking mode is always passed to the chat template.

    Args:
        endpoint: the server.
        tokenizer: the directory of the target.
        longest: how many tokens a prompt and its answer may have.
        concurrency: requests in flight.
        thinking: the mode of the chat template.
    """
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    shown = sys.stderr  # lm-eval's own is in a file meanwhile

    class Served(LocalCompletionsAPI):  # type: ignore[misc]
        def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            text: str = self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
                enable_thinking=thinking,
            )
            return text

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            for context, how in (request.args[:2] for request in requests):
                answer = how.get("max_tokens", how.get("max_gen_toks", self._max_gen_toks))
                _fits(len(self.tok_encode(context)) + answer, self.max_length, f", {answer} of them for its answer")
            found: list[str] = super().generate_until(requests, disable_tqdm=disable_tqdm)
            return found

        def _loglikelihood_tokens(self, requests: Iterable[Any], **named: Any) -> list[tuple[float, bool]]:
            listed = list(requests)
            for _, context, continuation in listed:
                _fits(len(context) + len(continuation), self.max_length)
            found: list[tuple[float, bool]] = super()._loglikelihood_tokens(listed, **named)
            return found

        async def get_batched_requests(
            self,
            requests: Sequence[list[int]],
            cache_keys: Sequence[Any],
            *,
            generate: bool = True,
            ctxlens: Sequence[int] | None = None,
            gen_kwargs: dict[str, Any] | None = None,
        ) -> list[list[Any]]:
            """Send token ids, and return of each what lm-eval reads out of the answer."""
            room = asyncio.Semaphore(concurrency)

            async def one(client: Client, ids: list[int], begin: int) -> list[Any]:
                how = copy.deepcopy(gen_kwargs)  # it is taken apart
                body = NEUTRAL | self._create_payload([ids], generate=generate, gen_kwargs=how, seed=self._seed)
                async with room:
                    said = await _patiently(client, body)
                advance(1)
                answers: list[Any] = (
                    self.parse_generations(said)
                    if generate
                    else self.parse_logprobs(said, tokens=[ids], ctxlens=[begin])
                )
                return answers

            with contextlib.redirect_stderr(shown), progress("lm-eval", len(requests), "requests") as advance:
                async with connected(endpoint, _TIMEOUTS) as client:
                    try:
                        async with asyncio.TaskGroup() as group:
                            sent = [
                                group.create_task(one(client, ids, begin))
                                for ids, begin in zip(requests, ctxlens or [0] * len(requests), strict=True)
                            ]
                    except ExceptionGroup as errors:
                        raise errors.exceptions[0] from None
            return [task.result() for task in sent]

    return Served(
        model=endpoint.model,
        base_url=f"{endpoint.base_url}/v1/completions",
        tokenizer=str(tokenizer),
        tokenizer_backend="huggingface",
        num_concurrent=2,  # of one, lm-eval would send the requests itself
        max_length=longest,
    )


async def _patiently(client: Client, body: dict[str, Any]) -> dict[str, Any]:
    """Send a request, and again where the server says that it has too much to do; raises ServerError."""
    for attempt in range(1, _TRIES):
        try:
            return await client.post_json("/v1/completions", body)
        except ServerError as error:
            if error.status not in _LATER:
                raise
        await asyncio.sleep(_BACKOFF_S * attempt)
    return await client.post_json("/v1/completions", body)


def _fits(tokens: int, longest: int, words: str = "") -> None:
    if tokens > longest:
        raise MxqError(
            f"a sample has {tokens} tokens{words}, and the server takes {longest}: lm-eval would cut the prompt",
            "serve longer texts (--engine-arg max-model-len=N), or leave the task out",
        )
