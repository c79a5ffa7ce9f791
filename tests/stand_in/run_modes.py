"""Runs the engine of each mode under the stand-in driver, and counts what it asks of the device.

Of each case: graphs captured while it warmed up and afterwards (which must be none), and of each round the kernels that
were launched one by one and replayed, waits of the host, and reads from the device; rules that were broken; exceptions.
"""

from __future__ import annotations

import argparse
import logging
import time
import traceback

from tests.stand_in.plausible import counts, in_rounds, install, violations

MODES = ("naive", "share", "classic", "ngram", "suffix", "recycle", "hybrid", "eagle", "glide")
PROMPT = [504, 2365, 6354, 16438, 27003, 690, 260, 23790, 2767, 30]
KINDS = {
    "greedy": {},
    "top-p": {"temperature": 1.0, "top_p": 0.9},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1},
    "logprobs": {"logprobs": True, "top_logprobs": 3},
    "sampled, penalties, logprobs": {"temperature": 0.8, "repetition_penalty": 1.1, "logprobs": True},
}


def joined(engine, params, num: int):
    """Requests that come one after the other, each while the others are decoded; one is cancelled."""
    from dataclasses import replace

    requests, waiting = [], [[*PROMPT * (1 + 9 * i)][: 200 * (i + 1)] for i in range(num)]
    while waiting or engine.num_running or engine.num_waiting:
        if waiting:
            ids = waiting.pop()
            requests.append(engine.add(ids, replace(params, max_new_tokens=24 + 8 * len(waiting)), len(requests)))
        engine.step()
        engine.step()
        if len(requests) == num - 1 and requests[0].finish_reason is None:
            engine.cancel(requests[0])
    return requests


def run_case(runtime, mode: str, params, batch: int, each_kind: bool) -> dict[str, object]:
    from compile.graphs import Graphs

    before_warm, started = Graphs.num_captures, time.perf_counter()
    engine = runtime.engine(mode, warm=params, each_kind=each_kind)
    warm_s = time.perf_counter() - started
    engine.generate([PROMPT] * batch, params)  # the first call may still see something for the first time
    before, seen, seen_in_rounds = Graphs.num_captures, counts(), dict(in_rounds)
    if batch == 1:
        done = engine.generate([PROMPT], params)
        assert len(done[0].token_ids) == params.max_new_tokens, done[0]
        rounds = engine.stats.steps
    else:
        engine.stats = engine._new_stats()
        requests = joined(engine, params, batch + 2)
        assert all(request.finish_reason or request.cancelled for request in requests)
        rounds = engine.stats.steps
    now = counts()
    of = {name: (in_rounds[name] - seen_in_rounds[name]) / max(1, rounds) for name in now}
    return {
        "captures": before - before_warm,
        "after": Graphs.num_captures - before,
        "rounds": rounds,
        "launched": of["launches"] + of["blas"],
        "graphs": of["graph_launches"],
        "replayed": of["replayed"],
        "syncs": of["stream_syncs"] + of["device_syncs"] + of["event_syncs"],
        "to host": of["to_host"],
        "to device": of["to_device"],
        "mallocs": now["mallocs"] - seen["mallocs"],
        "modules": now["modules"] - seen["modules"],
        "violations": now["violations"] - seen["violations"],
        "warm s": warm_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--kinds", default="; ".join(KINDS))
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rows-differ", action="store_true", help="the check of rows finds that widths matter")
    parser.add_argument("--no-check", action="store_true", help="leave the check of rows out")
    parser.add_argument("--each-kind", action="store_true", help="warm up all kinds of rounds first")
    parser.add_argument("--config", default="", help="more options of EngineConfig, as Python: max_draft=4, tree='off'")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")

    import sharesd.config as config_of
    from quant.config import QuantConfig
    from sharesd import EngineConfig, SamplingParams
    from sharesd.load import Runtime

    install(rows_agree=not args.rows_differ, run_check=not args.no_check, seed=args.seed)
    names = {**vars(config_of), "QuantConfig": QuantConfig}
    options = eval(f"dict({args.config})", names)
    options = {"device": "cuda", "max_batch": args.batch, **options}
    if "split" in options:
        del options["device"]
    modes = args.modes.split(",")
    started = time.perf_counter()
    runtime = Runtime(EngineConfig(**options), modes)
    print(f"loaded in {time.perf_counter() - started:.0f} s: {options}", runtime._rows.widths, runtime._rows.trees)
    print("of all so far:", {name: number for name, number in counts().items() if number}, flush=True)
    for mode in modes:
        for kind in args.kinds.split("; "):
            params = SamplingParams(max_new_tokens=args.tokens, ignore_eos=True, **KINDS[kind])
            try:
                found = run_case(runtime, mode, params, args.batch, args.each_kind)
                text = ", ".join(f"{k} {v:.1f}" if isinstance(v, float) else f"{k} {v}" for k, v in found.items())
                print(f"{mode}, {kind}: {text}", flush=True)
            except Exception as error:
                print(f"{mode}, {kind}: EXCEPTION {type(error).__name__}: {error}", flush=True)
                traceback.print_exc()
    print("violations:", violations() or "none")
    print("of all:", {name: number for name, number in counts().items() if number})


if __name__ == "__main__":
    main()
