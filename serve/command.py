"""Command line of the server."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from compile.start_times import START
from serve.cluster.options import NumReplicas, check_options, replicas_type
from serve.server_config import ServerSettings, key_pair
from sharesd.cli.console import err_console
from sharesd.cli.options import (
    Parser,
    add_mode_option,
    add_model_options,
    add_request_options,
    add_trace_option,
    engine_config,
    main_guard,
    mode_of,
    parse,
    request_settings,
)
from sharesd.cli.parse_types import SIZES, size
from sharesd.cli.startup import load_llm, warm_up
from sharesd.config import EngineConfig, Mode
from sharesd.field_types import DefaultLimit
from sharesd.sampling_params import SamplingParams

if TYPE_CHECKING:
    from serve.engine_thread import ServedModel
    from sharesd.llm import LLM

PROG = "python -m serve"
EMBEDDED = "SmolLM2-135M-Instruct"
"""Default model."""
PACKAGES = "fastapi uvicorn prometheus-client llguidance"
"""Packages of the optional dependencies `serve`."""
KEY_VARIABLE = "SHARESD_API_KEY"
"""Environment variable of an API key, not visible in process lists."""

Load = Callable[[EngineConfig, Mode, int | None], "ServedModel"]


def main(argv: Sequence[str] | None = None, load: Load | None = None, prog: str = PROG) -> int:
    """Run the server and return the exit status; `load` replaces `load_model`."""
    return main_guard(lambda: _run(parse(make_parser(prog), argv), load or load_model))


def load_model(config: EngineConfig, mode: Mode, memory_limit: int | None) -> ServedModel:
    """Load the model and warm up its engine.

    With `memory_limit` (bytes of the KV cache), a context of `auto` is the default length, not the model's own. Raises
    ValueError for a larger cache.
    """
    if memory_limit is not None:
        config = replace(config, max_context=config.planned_context)
    llm = load_llm(config, (mode,))
    taken = llm.runtime.cache.nbytes
    if memory_limit is not None and taken > memory_limit:
        raise ValueError(
            f"the KV cache of {config.max_batch} rows of {llm.max_context} tokens needs {taken / 2**20:.0f} MiB "
            f"and --memory-limit is {memory_limit / 2**20:.0f} MiB; lower --max-batch or --max-context"
        )
    warm_up(llm, mode, SamplingParams(), each_kind=True)
    START.end()
    return model_of(llm)


def model_of(llm: LLM) -> ServedModel:
    """Return a loaded model in the form that the server's handlers use."""
    from serve.engine_thread import ServedModel

    cache = llm.runtime.cache
    state_bytes = 0 if cache.recurrent is None else cache.recurrent.nbytes
    return ServedModel(
        engine=llm.runtime.engine,
        tokenizer=llm.tokenizer,
        max_context=llm.max_context,
        vocab_size=llm.runtime.target.vocab_size,
        grammars=llm.runtime.engine.grammars,
        kernels=llm.runtime.config.kernels if llm.runtime.device.type == "cuda" else "cpu",
        kv_bytes=cache.nbytes - state_bytes,
        state_bytes=state_bytes,
        num_rows=cache.batch,
    )


def make_parser(prog: str = PROG) -> Parser:
    """Return the parser; `prog` is the name of the program."""
    parser = Parser(
        prog=prog,
        description="Serve a model over HTTP with OpenAI's API. The address is printed to stdout when the server "
        "listens; each request is logged as a line on stderr.",
    )
    add_mode_option(parser, several=False)
    parser.add_argument("-v", "--verbose", action="store_true", help="show the time of each phase of the start")
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0: all")
    group.add_argument("--port", type=_port, default=8000, help="0: any free port")
    group.add_argument(
        "--max-batch", type=_count, default=DefaultLimit(8), metavar="N", help="maximum answers decoded in one batch"
    )
    group.add_argument("--max-queue", type=_count, default=64, metavar="N", help="maximum answers that wait")
    group.add_argument(
        "--prefill-chunk",
        type=_count,
        default=None,
        metavar="N",
        help="tokens of a prompt processed between two rounds of other answers (default: 512; on a CPU chosen from "
        "measured step times)",
    )
    group.add_argument(
        "--memory-limit",
        type=size,
        default=argparse.SUPPRESS,
        metavar="SIZE",
        help=f"maximum size of the KV cache, e.g. 512M or 2G; a larger one is an error at start; {SIZES}",
    )
    group.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help=f"require this key (repeatable); the environment variable {KEY_VARIABLE} adds one",
    )
    group.add_argument(
        "--cors-origin",
        type=_origin,
        action="append",
        default=[],
        metavar="ORIGIN",
        help="allowed CORS origin, e.g. https://example.org, or * (repeatable; default: none)",
    )
    group.add_argument("--ssl-certfile", metavar="FILE", help="PEM file of a certificate: serve HTTPS, not HTTP")
    group.add_argument("--ssl-keyfile", metavar="FILE", help="PEM file of its private key, without a password")
    group.add_argument(
        "--prompt-cache",
        metavar="FOLDER",
        help="save the KV of finished texts here and reuse it after a restart; the files contain the texts, too",
    )
    group.add_argument(
        "--prompt-cache-size",
        type=size,
        default="4G",
        metavar="SIZE",
        help="maximum size of --prompt-cache; the least recently used files are deleted first",
    )
    group.add_argument("--max-body", type=size, default="4M", metavar="SIZE", help="maximum size of a request")
    group.add_argument(
        "--shutdown-timeout",
        type=_seconds,
        default=30.0,
        metavar="S",
        help="seconds that running requests have to finish after SIGTERM",
    )
    add_request_options(group)
    group.add_argument(
        "--ray",
        action="store_true",
        help="serve with replicas on the Ray cluster at RAY_ADDRESS or on this machine; starts one if there is none",
    )
    group.add_argument(
        "--replicas",
        type=replicas_type,
        metavar="N",
        help="number of replicas for --ray, each with the whole model; MIN-MAX: scaled by queue length (default: 1)",
    )
    group.add_argument("--log-format", choices=("text", "json"), default="text", help="format of the request log")
    group.add_argument("--log-prompts", action="store_true", help="also log the prompts")
    add_trace_option(group)
    add_model_options(parser)
    return parser


def _run(args: argparse.Namespace, load: Load) -> int:
    mode = mode_of(args)
    config = replace(
        engine_config(args, modes=(mode,)),
        max_batch=args.max_batch,
        prefill_chunk=args.prefill_chunk,
        prompt_cache=args.prompt_cache,
        prompt_cache_size=args.prompt_cache_size,
    )
    check_options(config, ray=args.ray, num_replicas=args.replicas)
    if config.offload.when == "plan-only":
        load(config, mode, None)  # ends with the plan
    environment_key = os.environ.get(KEY_VARIABLE)
    target = config.target or EMBEDDED
    settings = ServerSettings(
        **{"model_name": Path(target).name, **request_settings(args)},
        root=target,
        mode=config.mode,
        max_batch=args.max_batch,
        max_queue=args.max_queue,
        max_body=args.max_body,
        api_keys=(*args.api_key, *([] if environment_key is None else [environment_key])),
        cors_origins=tuple(args.cors_origin),
        key_pair=key_pair(args.ssl_certfile, args.ssl_keyfile),
        shutdown_timeout=args.shutdown_timeout,
        json_log=args.log_format == "json",
        log_prompts=args.log_prompts,
    )
    try:
        with START.phase("import the server"):
            from serve.server import OpenBackend, Server, listen, local
    except ImportError as error:
        raise ValueError(f"the server needs more packages ({error}); run: pip install {PACKAGES}") from error
    open_backend: OpenBackend = local
    if args.ray:
        from serve.cluster.deployment import open_cluster

        open_backend = open_cluster(args.replicas or NumReplicas(1, 1), config.device)
    try:
        sock, url = listen(args.host, args.port, scheme="https" if settings.key_pair else "http")
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(f"cannot listen on {args.host}, port {args.port} ({reason}); choose another") from error
    with sock:
        print(url, flush=True)
        load_one = partial(load, config, mode, getattr(args, "memory_limit", None))
        if args.verbose:
            load_one = partial(_load_and_show, load_one)
        server = Server(settings, load_one, sock, open_backend)
        status = server.run()
    if server.left_thread:
        os._exit(status)
    return status


def _load_and_show(load_one: Callable[[], ServedModel]) -> ServedModel:
    """Load the model, and print the time of each phase of the start."""
    model = load_one()

    from sharesd.cli.display import start_table

    err_console.print(start_table(START))
    return model


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def _port(text: str) -> int:
    port = _count(text)
    if port > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; ports end at 65535")
    return port


def _origin(text: str) -> str:
    """Return an origin in the form that browsers send.

    Other forms would not match.
    """
    if not re.fullmatch(r"\*|[a-z][a-z0-9+.-]*://([^\sA-Z/?#@:\[\]]+|\[[0-9a-f:.]+\])(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not an origin; use for example https://example.org, or *")
    return text


def _seconds(text: str) -> float:
    if not re.fullmatch(r"\d+(\.\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return float(text)
