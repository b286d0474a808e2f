"""Checks between settings of a run, and defaults that equal those of torch."""

import inspect
import os

import pytest
import torch

from bandpo_cli.config.batch_and_sampling import OptimConfig, check_engine
from bandpo_cli.config.layers import read_assignments, resolve
from bandpo_cli.config.run import check_ranks
from bandpo_cli.errors import ConfigError


@pytest.mark.parametrize(
    ("others", "refused", "accepted"),
    [
        ([], "sampling.top_p=0.9", "sampling.top_p=1.0"),
        ([], "sampling.top_k=20", "sampling.top_k=0"),
        ([], "sampling.min_p=0.05", "sampling.min_p=0.0"),
        (["reward.correct=0.5"], "reward.wrong=0.5", "reward.wrong=0.4"),
        (["sampling.max_tokens=20"], "reward.overlong_buffer=21", "reward.overlong_buffer=20"),
        (["evaluation={temperature: 0, k: [1]}"], "evaluation.samples=2", "evaluation.samples=1"),
        (["evaluation.k=[4]"], "evaluation.samples=3", "evaluation.samples=4"),
        ([], "checkpoint.best_metric=time/step", "checkpoint.best_metric=train/accuracy"),
        ([], "optim.updates=3", "optim.updates=2"),
        (["objective.importance_cap=null"], "sampling.max_lag=1", "sampling.max_lag=0"),
        (["sampling.max_lag=1", "objective.importance_cap=null"], "objective.old_logprobs=trainer",
         "objective.old_logprobs=sampler"),
        (["sampling.max_lag=1"], "sampling.vllm.tensor_parallel=2", "sampling.vllm.tensor_parallel=1"),
        (["sampling.max_lag=1", "sampling.vllm.tensor_parallel=2"], "sampling.engine_process=true",
         "sampling.engine_process=false"),
        ([], "sampling.max_lag=1.5", "sampling.max_lag=8"),
        ([], "sampling.max_lag=-1", "sampling.max_lag=0"),
        ([], "model.chat_template_kwargs={a: 1}", "model.chat_template_kwargs=null"),
        (["task.name=gsm8k", "model.path=m/m", "model.prompts=raw"], "model.chat_template_kwargs.a=1",
         "model.chat_template_kwargs={}"),
        ([], "stop.entropy_below=0", "stop.entropy_below=1e-9"),
        ([], "stop.truncation_above=1", "stop.truncation_above=0"),
        ([], "stop.steps=0", "stop.steps=1"),
        (["objective.advantages=rloo"], "objective.advantage_std=false", "objective.advantage_std=true"),
        (["objective.advantages=maxrl"], "reward.wrong=-0.1", "reward.wrong=0"),
        (["reward.overlong_buffer=1", "reward.wrong=0.5"], "objective.advantages=maxrl", "objective.advantages=batch"),
        (["task.name=gsm8k", "model.path=m/m", "task.rewards=[math, {grader: format, weight: -1}]"],
         "objective.advantages=maxrl", "objective.advantages=rloo"),
        (["objective.old_logprobs=sampler"], "objective.importance=token-mask", "objective.importance_cap=null"),
        (["objective.old_logprobs=sampler"], "objective.importance_cap=3", "objective.importance=token-truncate"),
    ],
)  # fmt: skip
def test_contradictory_settings_are_refused_and_their_limit_is_accepted(others, refused, accepted):
    with pytest.raises(ConfigError, match=refused.partition(".")[0]):
        resolve([read_assignments([*others, refused])])
    resolve([read_assignments([*others, accepted])])


def test_the_message_about_a_lag_names_the_settings_to_change():
    keys = "set objective.importance_cap, such as 2.0, or objective.old_logprobs to 'sampler'"
    with pytest.raises(ConfigError, match=rf"sampling\.max_lag = 4: .*{keys}"):
        resolve([read_assignments(["sampling.max_lag=4", "objective.importance_cap=null"])])


def test_adamw_defaults_equal_those_of_torch():
    expected = inspect.signature(torch.optim.AdamW).parameters
    assert OptimConfig().betas == expected["betas"].default
    assert OptimConfig().eps == expected["eps"].default


@pytest.mark.parametrize(
    ("settings", "k"),
    [
        ([], (4, 16)),
        (["evaluation.samples=2"], (2,)),
        (["evaluation.samples=4"], (4,)),
        (["evaluation.samples=100"], (4, 16, 64, 100)),
        (["evaluation.samples=8", "evaluation.k=[2]"], (2,)),
        (["evaluation.samples=8", "evaluation.k=1,4"], (1, 4)),
        (["evaluation.samples=8", "evaluation.k=8"], (8,)),
        (["evaluation.samples=8", "evaluation.k=null"], (4, 8)),
        (["evaluation.samples=8", "evaluation.k=[]"], ()),
    ],
)
def test_k_follows_the_number_of_samples_unless_it_is_given(settings, k):
    assert resolve([read_assignments(settings)]).evaluation.k == k


def test_an_engine_process_is_refused_without_linux(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(ConfigError, match=r"^the engine process needs Linux; set sampling\.engine_process=f"):
        check_engine("transformers", "cpu", has_process=True)
    check_engine("transformers", "cpu", has_process=False)


def test_an_engine_over_several_gpus_with_several_ranks_is_refused():
    config = resolve([read_assignments(["sampling.vllm.tensor_parallel=2"])])
    check_ranks(config, 1)
    with pytest.raises(ConfigError, match=r"sampling.vllm.tensor_parallel = 2: each of 4 ranks has"):
        check_ranks(config, 4)
