"""Runs the engine of each mode under the stand-in driver, and counts what it asks of the device.

Of each case: graphs captured while it warmed up and afterwards (which must be none), and of each round the kernels that
were launched one by one and replayed, waits of the host, and reads from the device; rules that were broken; exceptions.
"""

from __future__ import annotations

import argparse
import time
import traceback

import sharesd.config as config_of
from quant.config import QuantConfig
from sharesd.config import EngineConfig
from sharesd.sampling_params import SamplingParams
from tests.stand_in.decoding import decode, load
from tests.stand_in.plausible import counts, install

MODES = ("naive", "share", "classic", "ngram", "suffix", "recycle", "hybrid", "eagle", "glide")
KINDS = {
    "greedy": {},
    "top-p": {"temperature": 1.0, "top_p": 0.9},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1},
    "logprobs": {"logprobs": True, "top_logprobs": 3},
    "sampled, penalties, logprobs": {"temperature": 0.8, "repetition_penalty": 1.1, "logprobs": True},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--kinds", default="; ".join(KINDS))
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rows-differ", action="store_true", help="the check of rows finds that widths matter")
    parser.add_argument("--each-kind", action="store_true", help="warm up all kinds of rounds first")
    parser.add_argument("--config", default="", help="more options of EngineConfig, as Python: max_draft=4, tree='off'")
    args = parser.parse_args()

    options = eval(f"dict({args.config})", {**vars(config_of), "QuantConfig": QuantConfig})
    device = {} if "split" in options else {"device": "cuda"}
    config = EngineConfig(**{**device, "max_batch": args.batch, **options})
    modes, started = tuple(args.modes.split(",")), time.perf_counter()
    install(rows_agree=not args.rows_differ)
    load(config, modes, not args.rows_differ)
    print(f"loaded in {time.perf_counter() - started:.0f} s", flush=True)
    print("of all so far:", dict(+counts()), flush=True)
    for mode in modes:
        for kind in args.kinds.split("; "):
            params = SamplingParams(max_new_tokens=args.tokens, ignore_eos=True, **KINDS[kind])
            try:
                more = {"joins": args.batch > 1, "each_kind": args.each_kind, "rows_agree": not args.rows_differ}
                found = decode(config, modes, mode, params, **more)
                text = ", ".join(f"{k} {v:.1f}" if isinstance(v, float) else f"{k} {v}" for k, v in found.items())
                print(f"{mode}, {kind}: {text}", flush=True)
            except Exception as error:
                print(f"{mode}, {kind}: EXCEPTION {type(error).__name__}: {error}", flush=True)
                traceback.print_exc()
    print("of all:", dict(+counts()))


if __name__ == "__main__":
    main()
