"""Advice where nothing can be learned: what the completions of a step look like, and the settings to try."""

import logging
from collections.abc import Mapping

from bandpo_cli.callbacks import CallbackBase, StepReport
from bandpo_cli.config.run import RunConfig
from bandpo_cli.config.task import DataTask
from bandpo_cli.errors import one_line

STEPS_WITHOUT_GRADIENT = 3
"""Steps in a row without a group of different rewards after which a run gives advice."""

COMMON = 0.2
"""Share of completions, or of groups with a gradient, that decides whether advice mentions it; the console view flags
truncated and unreadable completions from the same share on."""

_SHORTEST_ANSWER = 256
"""Tokens that advice gives a completion at least: a worked answer to a school problem takes 100 to 300."""

_EXCERPT = 160
"""Characters of a completion that the warning quotes."""

_CALL = '<tool_call>{"name": ..., "arguments": {...}}</tool_call> (or the form of its response template)'
"""The forms of a call (`sampling.tool_calls`)."""

log = logging.getLogger("bandpo_cli")


def advice(config: RunConfig, metrics: Mapping[str, float]) -> list[str]:
    """Return the settings to try, each with its reason, the most likely cause first; empty if nothing stands out.

    Args:
        metrics: those of a step (`training.metrics`): of its completions, and of its updates if there were any.
    """
    truncated, unreadable = metrics["train/truncated_fraction"], metrics["grade/malformed_fraction"]
    useful, accuracy = 1 - metrics["train/uniform_group_fraction"], metrics["train/accuracy"]
    lines = []
    if (ungraded := metrics["train/ungraded_fraction"]) > COMMON:
        late = metrics.get("grade/timeout_fraction", 0.0)
        repair = "a longer grading.deadline, or imports at the top of the file of the grader instead of in its body"
        lines.append(f"{repair if late else 'a repaired grader'}, since {ungraded:.1%} were not graded")
    if truncated > COMMON:
        tokens = max(_SHORTEST_ANSWER, 2 * config.sampling.max_tokens)
        cut = f"{truncated:.1%} of the completions are truncated at {config.sampling.max_tokens:,} tokens"
        lines.append(f"--max-tokens {tokens}, since {cut}")
    if unreadable > COMMON:
        form = "a model that knows the form of the answers, or another --task"
        if isinstance(config.task, DataTask):
            form = "a prompt that asks for the form of the answer (--template), or another --grader"
        lines.append(f"{form}, since {unreadable:.1%} have no readable answer")
    if _without_calls(config, metrics):
        lines.append(f"a prompt that shows the model {_CALL}, since no completion called a tool")
    if useful <= COMMON and accuracy > 1 - COMMON:
        lines.append(f"harder problems, since {accuracy:.1%} of the completions are correct")
    elif useful <= COMMON and not lines:
        problems = "problems that the model solves sometimes, or a reward function with partial credit"
        samples = f"--set sampling.samples={2 * config.sampling.samples}"
        lines.append(f"{problems}, or {samples}, since {accuracy:.1%} of the completions are correct")
    if (clipped := metrics.get("clip/active_fraction", 0.0)) > COMMON:
        lines.append(f"--lr {config.optim.lr / 2:g}, since {clipped:.1%} of the tokens are clipped")
    if 0 < useful <= COMMON:
        share = f"only {useful:.1%} of the groups have different rewards"
        lines.append(f"--set sampling.dynamic=true, which samples more groups in a step, since {share}")
    return lines


def _without_calls(config: RunConfig, metrics: Mapping[str, float]) -> bool:
    """Return whether the task has tools, and no completion of a step called one."""
    return bool(config.task.tools) and metrics.get("conversation/calls") == 0


class AdviceCallback(CallbackBase):
    """Warns once of each: several steps in a row without a gradient, and a step in which no completion called a tool.

    A step has no gradient where the rewards of every group are equal.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config, self._in_a_row, self._has_tools = config, 0, bool(config.task.tools)

    def step(self, report: StepReport) -> None:
        """Count the steps without a gradient; a step without rollouts (step 0) does not count."""
        record = report.record
        if report.sample is not None and self._has_tools and _without_calls(self._config, record):
            self._has_tools = False
            log.warning(
                "no completion of step %d called a tool; one of them: '%s'; try a prompt that shows the model %s",
                report.step,
                one_line(report.sample.text)[:_EXCERPT],
                _CALL,
            )
        if report.sample is None or self._in_a_row == STEPS_WITHOUT_GRADIENT:
            return
        self._in_a_row = self._in_a_row + 1 if record["train/uniform_group_fraction"] == 1 else 0
        if self._in_a_row == STEPS_WITHOUT_GRADIENT:
            reward = record.get("train/reward")
            log.warning(
                "nothing was learned in the last %d steps: the rewards of every group were equal (last step: %s, "
                "%.1f%% truncated, %.1f%% without a readable answer); a completion: '%s'; try: %s",
                STEPS_WITHOUT_GRADIENT,
                f"mean reward {reward:.3g}" if reward is not None else "no completion has a reward",
                100 * record["train/truncated_fraction"],
                100 * record["grade/malformed_fraction"],
                one_line(report.sample.text)[:_EXCERPT],
                "; ".join(advice(self._config, record)),
            )
