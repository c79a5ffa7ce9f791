"""The examples for Ray, where it is installed (`pip install '.[ray]'`)."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType

import pytest

from sharesd import EngineConfig, SamplingParams, build
from tests.helpers.paths import ROOT
from tests.helpers.tiny import make_checkpoint

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
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = make_checkpoint(tmp_path_factory.mktemp("tiny") / "model")
    return EngineConfig(target=str(folder), mode="naive", max_batch=3, max_context=128, compile="off")


def example(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "examples")
    return importlib.import_module(name)


def texts(config: EngineConfig, index: bool) -> list[str]:
    """Of one engine, one prompt after the other."""
    engine, found = build(config), []
    for i, prompt in enumerate(PROMPTS):
        request = engine.add(engine.tokenizer.ask(prompt), PARAMS, i if index else 0)
        text = ""
        while request.finish_reason is None:
            text += "".join(chunk.text for chunk in engine.step())
        found.append(text)
    return found


def test_ray_data_answers_in_order(cluster: None, config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = example("ray_data", monkeypatch).answers
    rows = answers(PROMPTS, config, PARAMS, replicas=1, num_gpus=0, num_cpus=1).take_all()
    assert [row["prompt"] for row in rows] == PROMPTS
    assert [row["text"] for row in rows] == texts(config, index=True)


def test_ray_serve_answers_each_as_if_it_were_alone(
    cluster: None, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray import serve

    handle = serve.run(example("ray_serve", monkeypatch).Answerer.bind(config), route_prefix="/x")
    fields = {"max_new_tokens": 8, "temperature": 1.0, "seed": 3}
    waiting = [handle.answer.remote({"prompt": prompt, **fields}) for prompt in PROMPTS]
    wrong = [handle.answer.remote(one) for one in ({"prompt": "the", "max_new_tokens": -1}, {"seed": 1})]
    found = [response.result() for response in waiting]
    assert [answer["text"] for answer in found] == texts(config, index=False)
    assert {answer["finish_reason"] for answer in found} == {"length"}
    assert all("error" in response.result() for response in wrong)
    serve.shutdown()
