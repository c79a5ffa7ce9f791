"""Ray Data: a file of prompts answered by engines all over a Ray cluster.

    pip install '.[ray]'
    python examples/ray_data.py prompts.jsonl answers --replicas 4 --gpus 1

`prompts.jsonl` has a record with `prompt` on each line. The answer depends on the prompt, its place and the seed alone:
any number of replicas gives the same texts as `sharesd generate --prompts`.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
import torch

from sharesd import LLM, SamplingParams
from sharesd.sampling import seeds_of_prompts


class Answerer:
    """One model, in a process of Ray's."""

    def __init__(self, options: dict[str, Any], params: SamplingParams) -> None:
        self.llm, self.params = LLM(**options), params

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Texts of the answers to `prompt`, each with noise by its `index`."""
        asked = [[{"role": "user", "content": str(prompt)}] for prompt in batch["prompt"]]
        seeds = seeds_of_prompts(self.params.seed, torch.tensor(batch["index"], dtype=torch.int64)).tolist()
        answers = self.llm.chat(asked, [replace(self.params, seed=seed) for seed in seeds])
        return {**batch, "text": [answer.text for answer in answers]}


def answers(
    prompts: list[str],
    options: dict[str, Any],
    params: SamplingParams,
    *,
    replicas: int,
    num_gpus: float,
    num_cpus: float,
) -> ray.data.Dataset:
    """The prompts with their answers, in order."""
    asked = ray.data.from_items([{"index": index, "prompt": prompt} for index, prompt in enumerate(prompts)])
    return (
        asked.repartition(max(1, len(prompts) // options["max_batch"]))
        .map_batches(
            Answerer,
            fn_constructor_args=(options, params),
            batch_size=options["max_batch"],
            concurrency=replicas,
            num_gpus=num_gpus,
            num_cpus=num_cpus,
        )
        .sort("index")
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts")
    parser.add_argument("out", help="folder for the answers, as JSON Lines")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--gpus", type=float, default=0, help="GPUs of each replica")
    parser.add_argument("--cpus", type=float, default=1, help="cores of each replica")
    args = parser.parse_args()
    lines = Path(args.prompts).read_text(encoding="utf-8").splitlines()
    found = answers(
        [json.loads(line)["prompt"] for line in lines],
        {"mode": "hybrid", "max_batch": 8},
        SamplingParams(max_new_tokens=512),
        replicas=args.replicas,
        num_gpus=args.gpus,
        num_cpus=args.cpus,
    )
    found.write_json(args.out)


if __name__ == "__main__":
    main()
