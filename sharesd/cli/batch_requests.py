"""OpenAI's batch format: lines of requests, and lines of answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from sharesd.data.prompt_files import Message, conversation
from sharesd.sampling_params import SamplingParams

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
DEFAULT_TOKENS = {CHAT: 2**31 - 1, TEXT: 16}
"""Token limits of the API; the context may end an answer before."""
SAME = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("seed", "ignore_eos"),
)
"""Fields of a body with the names of SamplingParams."""
IGNORED = ("model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
"""Fields without effect on the answer."""
NEUTRAL: dict[str, Any] = {"n": 1, "best_of": 1, "stream": False, "logprobs": False, "top_logprobs": 0, "echo": False}
"""Fields that are taken with this value, which asks for nothing."""


class BatchRequest(NamedTuple):
    """One request of a batch file."""

    url: str
    prompt: str | list[Message]
    params: SamplingParams


def is_batch(record: Any) -> bool:
    """Return True for a record in OpenAI's batch format."""
    return isinstance(record, Mapping) and "custom_id" in record and "body" in record


def parse(record: Mapping[str, Any], params: SamplingParams) -> BatchRequest:
    """Return a record's request; ValueError for what cannot be done offline.

    Of `params`, the seed counts, and what the API has no field for.
    """
    url, body = record.get("url"), record["body"]
    if url not in DEFAULT_TOKENS or record.get("method", "POST") != "POST" or not isinstance(body, Mapping):
        raise ValueError(f"is a request to {url!r:.60}; give POST to {CHAT} or {TEXT}, with a body")
    given = {name: value for name, value in body.items() if value is not None and name not in IGNORED}
    for name, value in NEUTRAL.items():
        if given.pop(name, value) != value:
            raise ValueError(f"has {name} {body[name]!r:.60}, which is not done offline; leave it out")
    messages = given.pop("messages" if url == CHAT else "prompt", None)
    limits = [given.pop(name, None) for name in ("max_completion_tokens", "max_tokens")]
    found: dict[str, Any] = {name: given.pop(name) for name in SAME if name in given}
    if found.get("top_k") == -1:
        found["top_k"] = 0
    stops = given.pop("stop", ())
    found["stop"] = tuple(stop for stop in ([stops] if isinstance(stops, str) else stops) if stop)
    found["stop_token_ids"] = tuple(given.pop("stop_token_ids", ()))
    found["min_new_tokens"] = given.pop("min_tokens", 0)
    found["logit_bias"] = {int(token): amount for token, amount in given.pop("logit_bias", {}).items()}
    if given:
        raise ValueError(f"has {', '.join(map(repr, given))}, not done offline; leave it out, or ask a server")
    limit = next((limit for limit in limits if limit not in (None, -1)), DEFAULT_TOKENS[url])
    found = {"temperature": 1.0, **found, "max_new_tokens": limit}
    if found.get("seed") == -1:
        del found["seed"]
    try:
        made = replace(params, logprobs=False, top_logprobs=0, **found)
    except TypeError as error:
        raise ValueError(f"has a field of the wrong type ({error})") from None
    if url == CHAT:
        if not isinstance(messages, list) or not messages:
            raise ValueError("has no messages; give at least one")
        return BatchRequest(url, conversation({"messages": messages}), made)
    if not isinstance(messages, str) or not messages:
        raise ValueError("has no prompt; give a text")
    return BatchRequest(url, messages, made)


def answer_line(
    record: Mapping[str, Any], index: int, text: str, finish_reason: str | None, num_prompt: int, num_answer: int
) -> dict[str, Any]:
    """Return the line of an answer.

    It is equal for equal requests, so `created` is 0.
    """
    is_chat = record["url"] == CHAT
    said = {"message": {"role": "assistant", "content": text, "refusal": None}} if is_chat else {"text": text}
    body = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-batch-{index}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": 0,
        "model": record["body"].get("model"),
        "choices": [{"index": 0, **said, "logprobs": None, "finish_reason": finish_reason}],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_answer,
            "total_tokens": num_prompt + num_answer,
        },
    }
    response = {"status_code": 200, "request_id": f"batch-{index}", "body": body}
    return {"id": f"batch_req_{index}", "custom_id": record["custom_id"], "response": response, "error": None}


def failure_line(record: Mapping[str, Any], index: int, reason: str) -> dict[str, Any]:
    """Return the line of a request that failed."""
    error = {"code": "invalid_request", "message": reason}
    return {"id": f"batch_req_{index}", "custom_id": record["custom_id"], "response": None, "error": error}
