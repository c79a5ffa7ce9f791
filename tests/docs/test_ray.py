"""The examples for Ray, where it is installed (`pip install '.[ray]'`)."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from sharesd import LLM, SamplingParams
from tests.helpers.paths import ROOT
from tests.helpers.tiny_models import make_checkpoint

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
pytestmark = [pytest.mark.slow, pytest.mark.subprocess]
PROMPTS = [f"the cat {i}" for i in range(12)]
PARAMS = SamplingParams(max_new_tokens=8, temperature=1.0, seed=3)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    paths = {"env_vars": {"PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}"}}
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env=paths)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = make_checkpoint(tmp_path_factory.mktemp("tiny") / "model")
    return {"target": str(folder), "mode": "naive", "max_batch": 3, "max_context": 128, "compile": "off"}


def example(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "examples")
    return importlib.import_module(name)


def texts(options: dict[str, Any], *, alone: bool) -> list[str]:
    """As one call, or each in a call of its own."""
    asked = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    with LLM(**options) as llm:
        return [done.text for done in ([llm.chat(one, PARAMS) for one in asked] if alone else llm.chat(asked, PARAMS))]


def test_ray_data_answers_in_order(cluster: None, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    answers = example("ray_data", monkeypatch).answers
    rows = answers(PROMPTS, options, PARAMS, replicas=1, num_gpus=0, num_cpus=1).take_all()
    assert [row["prompt"] for row in rows] == PROMPTS
    assert [row["text"] for row in rows] == texts(options, alone=False)


def test_ray_serve_answers_each_as_if_it_were_alone(
    cluster: None, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray import serve

    handle = serve.run(example("ray_serve", monkeypatch).Answerer.bind(options), route_prefix="/x")
    fields = {"max_new_tokens": 8, "temperature": 1.0, "seed": 3}
    waiting = [handle.answer.remote({"prompt": prompt, **fields}) for prompt in PROMPTS]
    wrong = [handle.answer.remote(one) for one in ({"prompt": "the", "max_new_tokens": -1}, {"seed": 1})]
    found = [response.result() for response in waiting]
    assert [answer["text"] for answer in found] == texts(options, alone=True)
    assert {answer["finish_reason"] for answer in found} == {"length"}
    assert all("error" in response.result() for response in wrong)
    serve.shutdown()
