"""Trials before a run: its start and every grader (dry run), and some completions and one step (probe).

Nothing is written, and MLflow receives nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bandpo_cli.callbacks import TrainCallback
from bandpo_cli.config.layers import with_values
from bandpo_cli.config.run import ModelConfig, RunConfig
from bandpo_cli.config.task import DataTask
from bandpo_cli.errors import ConfigError
from bandpo_cli.experiments.memory_check import OnEstimate, out_of_memory_errors
from bandpo_cli.experiments.monitor import ANSWER_FORMS, Dispatcher
from bandpo_cli.experiments.plan import Plan, problems_by_grader
from bandpo_cli.experiments.run import TrainEvents, load_components, start_run
from bandpo_cli.grading.pool import DUMMY_TEXT, IMPORT_ADVICE, GraderPool, problem_error
from bandpo_cli.paths import path_exists, user_path
from bandpo_cli.registries import BUNDLED_MODELS, GRADERS
from bandpo_cli.tasks.task import Task
from bandpo_cli.types import MALFORMED, Grade, Group, Problem, is_ungraded

if TYPE_CHECKING:
    from bandpo_cli.models.memory_estimate import MemoryEstimate
    from bandpo_cli.sampling.rollouts import Prompts
    from bandpo_cli.training.build import Components

PROBLEMS = 32  # problems that a probe samples
PART = 4  # problems of a probe after which it reports the time that the others take

TRIAL_TOKENS = 8192
"""Completion tokens of the trial step, if one group per update has no more: the updates of larger models take a minute
on a CPU, and those of small models long enough to be timed."""


def try_graders(config: RunConfig, task: Task) -> Iterator[tuple[Problem, str, Grade, list[str]]]:
    """Yield a problem of every grader, a dummy completion, its grade, and reasons to expect wrong grades.

    Raise ConfigError if a grader fails. Imports no torch.
    """
    with GraderPool(config.grading) as pool:
        for name, problems in problems_by_grader(task.train_problems(), config.task.rewards).items():
            errors = [problem_error(name, problem) for problem in problems] if name in GRADERS else [None]
            problem = replace(problems[errors.index(None)], grader=name)
            completion = _dummy_completion(config, problem)
            [grade] = pool.grade([problem], [completion])
            if is_ungraded(grade):
                limit = f"no result after {config.grading.deadline:g} s (grading.deadline)"
                limit += "" if name in GRADERS else IMPORT_ADVICE
                what = f"grader '{name}' failed on the dummy completion {completion!r:.80}"
                raise ConfigError(f"{what}: {pool.uses[name].error or limit}")
            warnings = []
            if unreadable := [error for error in errors if error is not None]:
                count = f"{len(unreadable):,} of {len(problems):,} problems; the first: {unreadable[0]}"
                warnings.append(f"grader '{name}' cannot grade answers to {count}")
            if name in GRADERS and grade == MALFORMED:
                form = "an answer in the form that task.template asks for"
                warnings.append(f"grader '{name}' does not read {form}")
            yield problem, completion, grade, warnings


class _NotLoadedError(Exception):
    """The reason why a dry run does not load the weights, which training would load."""


def dry_run(
    plan: Plan, callbacks: Sequence[TrainCallback], stack: ExitStack, on_estimate: OnEstimate
) -> tuple[Components | Prompts | None, str]:
    """Start the run of a plan as training does, and stop before its folder is written; see `start_run`.

    Returns what was loaded, and what was not and why: no weights are loaded that are not on this machine yet, or of a
    run that does not fit into its memory. The errors are those of training.
    """

    def check_loading(config: RunConfig, estimate: MemoryEstimate) -> None:
        on_estimate(config, estimate)
        if not _has_weights(config.model):
            raise _NotLoadedError("they are not on this machine; training downloads them")
        if not (estimate.device.on_gpu or estimate.fits):
            raise _NotLoadedError("the run does not fit into the memory of this machine")

    try:
        return start_run(plan, callbacks, stack, check_loading)[2], ""
    except _NotLoadedError as reason:
        from bandpo_cli.sampling.rollouts import encode_prompts

        assert plan.task is not None  # else there is nothing to load
        return encode_prompts(plan.pinned, plan.task), f"the weights ({reason})"


def _has_weights(model: ModelConfig) -> bool:
    """Return whether the weights are on this machine: of a folder, or of the hub in its cache."""
    from huggingface_hub import try_to_load_from_cache

    from bandpo_cli.models.model_files import INDEX, WEIGHTS

    if model.path in BUNDLED_MODELS or path_exists(user_path(model.path)):
        return True
    cached = (try_to_load_from_cache(model.path, name, revision=model.revision) for name in (WEIGHTS, INDEX))
    return any(isinstance(path, str) for path in cached)


def _dummy_completion(config: RunConfig, problem: Problem) -> str:
    """Return the reference in the form that the template or, for another template, the grader asks for."""
    if not problem.answer:
        return DUMMY_TEXT
    if problem.grader == "countdown":  # the reference is the value of an expression
        return " + ".join(str(problem.extra["numbers"]).split())
    if problem.grader == "reasoning-gym":
        return f"<answer>{problem.answer}</answer>"
    template = config.task.template if isinstance(config.task, DataTask) else ""
    if template not in ANSWER_FORMS and problem.grader in GRADERS:
        template = next(iter(GRADERS[problem.grader].templates), "answer-line")
    return ANSWER_FORMS.get(template, "{}").format(problem.answer)


@dataclass(frozen=True)
class ProbeReport:
    """Results of a probe; without a group of different rewards it has no trial step, and updates have no time."""

    groups: Sequence[Group]  # the graded completions of the untrained model
    metrics: dict[str, float]  # of them and of the trial step, by the names of metrics.jsonl
    trial_groups: int  # number of groups of the trial step
    sample_seconds: float  # of a step of the run, by the times of the probe
    update_seconds: float | None  # of the updates of a step
    run_seconds: float  # of the complete run with its evaluations; without updates that have no time


def probe(
    plan: Plan,
    callbacks: Sequence[TrainCallback] = (),
    size: int = PROBLEMS,
    on_progress: Callable[[int, int, float], None] = lambda *_: None,
) -> ProbeReport:
    """Sample and grade completions of the untrained model, and measure a trial step; the errors are those of `train`.

    The trial step has the updates of a step of the run at the full learning rate, on a part of the groups, first those
    whose rewards differ. The weights that it changes are in memory only. `callbacks` receive the event `phase`.

    `size` is the number of problems, rounded to a multiple of `optim.updates`. `on_progress` receives after each part
    the numbers of problems that are sampled and graded, and of all, and the seconds that the others take by the last
    part: the engine of the trainer samples `PART` problems at a time, another one these and then all others.
    """
    run, updates, task = plan.pinned, plan.config.optim.updates, plan.task
    assert task is not None  # only a resume can be without problems
    problems = min(size, len(task.train_problems()))
    values = {
        "sampling.prompts": max(1, problems // updates) * updates,
        "sampling.dynamic": False,
        "sampling.max_lag": 0,
        "optim.warmup_steps": 0,
    }
    events: TrainEvents = Dispatcher(callbacks)
    with ExitStack() as stack:
        config, components = load_components(with_values(run, values), task, events, stack)
        stack.enter_context(out_of_memory_errors(config))
        from bandpo_cli.methods.loss import policy_loss
        from bandpo_cli.sampling.sampler import is_exact
        from bandpo_cli.training.experience import prepare_updates
        from bandpo_cli.training.loop import step_advantages
        from bandpo_cli.training.metrics import rollout_metrics, update_metrics
        from bandpo_cli.training.performance import StepTimer
        from bandpo_cli.training.rollout_batches import RolloutBatches, select_groups
        from bandpo_cli.training.update import update_policy

        policy, timer = components.policy, StepTimer(events.phase)
        groups: list[Group] = []
        with RolloutBatches(config, components) as batches:
            while (left := config.sampling.prompts - len(groups)) > 0:
                count = left if groups and components.sampler.streams else min(PART, left)
                start = timer.seconds("sample", "grade")
                groups += batches.take_part(1, len(groups), count, timer)
                seconds = (timer.seconds("sample", "grade") - start) / count * (left - count)
                on_progress(len(groups), config.sampling.prompts, seconds)
        metrics = rollout_metrics(groups)
        useful = round((1 - metrics["train/uniform_group_fraction"]) * len(groups))
        tokens = metrics["train/response_length"] * run.sampling.samples * updates
        tried = updates * max(1, min(len(groups) // updates, int(TRIAL_TOKENS / tokens)))
        if useful:
            components.sampler.sleep()
            with timer.phase("logprobs"):
                chosen = select_groups(groups, tried, updates)
                graded = chosen, step_advantages(config, chosen)
                bounds = config.bounds.model_copy(update=config.bounds.scheduled(1, config.steps))
                loss = policy_loss(bounds, config.objective)
                exact = is_exact(components.sampler, policy)
                experiences = prepare_updates(policy, components.reference, *graded, loss, config, exact)
            with timer.phase("update"):
                metrics |= update_metrics(update_policy(policy, components.optimizer, experiences, config))
    per_prompt = timer.seconds("sample", "grade") / len(groups)
    # Groups whose rewards are all equal do not go through the model in an update.
    sampling, updating = run.sampling.prompts * per_prompt, None
    if useful:
        per_useful = timer.seconds("logprobs", "update") / min(useful, tried)
        updating = run.sampling.prompts * useful / len(groups) * per_useful
    evaluations = sum(run.evaluation.is_due(step, run.steps) for step in range(run.steps + 1))
    heldout = sum(len(items[: run.evaluation.problems]) for items in task.heldout_sets().values())
    evaluating = evaluations * heldout * per_prompt * run.evaluation.samples / run.sampling.samples
    times = sampling, updating, run.steps * (sampling + (updating or 0.0)) + evaluating
    return ProbeReport(groups, metrics, tried, *times)
