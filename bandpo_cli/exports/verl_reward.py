"""Reward function for verl: the graders and rewards of a configuration, in the form of verl's `compute_score`.

verl's processes import the module: it needs neither torch nor transformers.
"""

import logging
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from bandpo_cli.config.layers import read_layer, resolve
from bandpo_cli.config.run import RunConfig
from bandpo_cli.exports.verl_files import problem_from_json
from bandpo_cli.grading.pool import GraderPool, grade_components
from bandpo_cli.types import Grade, Problem

log = logging.getLogger("bandpo_cli")


class RewardFunction:
    """The rewards of a configuration as verl's `compute_score`, for any number of calling threads.

    verl calls it once per completion, from many threads, while a grader pool takes many completions and one caller. The
    first of the waiting calls therefore grades all of them.
    """

    def __init__(self, config: RunConfig) -> None:
        """Create the function without spawning a worker process."""
        self._reward, self._components = config.reward, config.task.rewards or ()
        self._pool = GraderPool(config.grading)
        self._pool_lock = threading.Lock()
        self._waiting: SimpleQueue[tuple[Problem, str, Future[Grade]]] = SimpleQueue()
        self._reported: set[str] = set()

    def __call__(
        self, data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any], **_: Any
    ) -> dict[str, float]:
        """Return `score`, the reward without the penalty for long completions, and `acc`, 1 for a correct answer.

        `extra_info` is that of a row of `verl_files.problem_table`, which has the complete problem.
        """
        result: Future[Grade] = Future()
        self._waiting.put((problem_from_json(extra_info["problem"]), solution_str, result))
        with self._pool_lock:
            if not result.done():  # else another thread has graded the completion meanwhile
                self._grade_waiting()
        grade, reward = result.result(), self._reward
        score = reward.wrong + (reward.correct - reward.wrong) * grade.reward
        return {"score": score, "acc": float(grade.correct)}

    def _grade_waiting(self) -> None:
        """Grade all waiting completions and set their results; an error is raised in every thread that waits."""
        batch = [self._waiting.get() for _ in range(self._waiting.qsize())]
        problems, texts, results = zip(*batch, strict=True)
        try:
            grades = grade_components(self._pool.grade, self._components, problems, texts)
        except Exception as error:  # noqa: BLE001 - each waiting thread raises it
            for result in results:
                result.set_exception(error)
            return
        for result, grade in zip(results, grades, strict=True):
            result.set_result(grade)
        for name, message in self._pool.errors.items():
            if name not in self._reported:
                self._reported.add(name)
                log.warning("grader '%s' failed on an answer, which counts as wrong: %s", name, message)


def load_reward_function(config_file: str | Path) -> RewardFunction:
    """Return the reward function of a configuration file, such as the config.yaml of an exported folder."""
    return RewardFunction(resolve([read_layer(Path(config_file))]))
