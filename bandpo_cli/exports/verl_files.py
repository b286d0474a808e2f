"""Folder of an experiment for verl: data files, run.sh, reward function, README.md, values in the syntax of Hydra.

A row of the data files has verl's columns: `data_source`, `prompt`, `ability`, `reward_model` and `extra_info`. The
complete problem is in `extra_info.problem` as JSON, which `RewardFunction` reads back. verl's processes import this
module for it, which needs neither torch nor transformers.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
import threading
from base64 import urlsafe_b64encode
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from hashlib import sha256
from importlib import metadata
from io import BytesIO
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any
from zipfile import ZIP_DEFLATED, ZipFile

from bandpo_cli import __version__
from bandpo_cli.config.layers import Layer, flatten, nest, read_layer, resolve, setting_changes, setting_text
from bandpo_cli.config.run import RunConfig, with_dtype
from bandpo_cli.custom_code import add_code_folder
from bandpo_cli.errors import ConfigError, log
from bandpo_cli.exports.verl_settings import RULES, InFolder, Overrides, tokens_per_micro_batch
from bandpo_cli.grading.pool import GraderPool, grade_components
from bandpo_cli.paths import given_path
from bandpo_cli.storage.files import write_json
from bandpo_cli.types import Grade, Message, Problem, joined_text, messages_of

if TYPE_CHECKING:
    import pyarrow as pa


VERL_VERSION = "0.9.1"
"""The version whose settings, defaults and losses the export is written for."""

TRAIN_FILE, HELDOUT_FILE = "train.parquet", "heldout.parquet"
REWARD_FILE, CONFIG_FILE = "reward.py", "config.yaml"
BAND_MODULE = "bandpo_cli.integrations.verl"
"""The module that verl imports for the policy loss `band`."""

_PLAIN = re.compile(r"[A-Za-z][\w./-]*")
_RESERVED = {"true", "false", "null", "nan", "inf", "none"}


MACHINE = {
    "model.dtype": "auto",
    "model.attention": "auto",
    "model.device": "auto",
    "sampling.engine": "auto",
    "sampling.vllm.memory_fraction": None,
}
"""Settings of a run that its machine decided, with their values in a job for another one."""


def settings_for_cluster(
    run: str, layers: Sequence[Layer] = (), runs_dir: Path | str = "runs"
) -> tuple[RunConfig, list[str]]:
    """Return the settings of a run for a job on GPUs, and a line for each of `MACHINE` that changed.

    Args:
        layers: further settings, which win.

    Raises:
        UserError: there is no such run.
    """
    from bandpo_cli.storage.run_folder import RunFolder

    path = RunFolder.open(given_path(runs_dir), run).path
    add_code_folder(path)
    stored = read_layer(path / "config.yaml")
    config = resolve([stored, nest(MACHINE), *layers])
    changes = setting_changes(resolve([stored]), with_dtype(config, on_gpu=True))
    given = {key for layer in layers for key in flatten(layer)}
    return config, [
        f"{key} = {setting_text(old)} of the machine of the run is {setting_text(new)}; "
        f"--set {key}={setting_text(old)} keeps it"
        for key, (old, new) in changes.items()
        if key in MACHINE.keys() - given
    ]


def batch_arithmetic(config: RunConfig, gpus: int, problems: int) -> list[str]:
    """Return the numbers of prompts, completions and updates per step and GPU; raise ConfigError if they do not fit."""
    prompts, samples, updates = config.sampling.prompts, config.sampling.samples, config.optim.updates
    parallel = config.sampling.vllm.tensor_parallel
    per_update = prompts // updates * samples
    checks = [
        (problems < prompts,
         f"sampling.prompts = {prompts}: there are {problems:,} training problems, and verl drops a batch that is not "
         "complete; take fewer prompts"),
        (gpus % parallel, f"sampling.vllm.tensor_parallel = {parallel} does not divide the {gpus} GPUs of the job"),
        (per_update % gpus,
         f"an update has {prompts} / {updates} × {samples} = {per_update:,} completions (sampling.prompts / "
         f"optim.updates × sampling.samples), and verl needs a multiple of the {gpus} GPUs"),
    ]  # fmt: skip
    if failing := [message for fails, message in checks if fails]:
        raise ConfigError("; ".join(failing))
    longest = config.sampling.max_prompt_tokens + config.sampling.max_tokens
    tokens = tokens_per_micro_batch(config)
    return [
        f"per step: {prompts:,} prompts × {samples} completions = {prompts * samples:,} completions; GPUs: "
        f"{gpus}, vLLM engines: {gpus // parallel}",
        f"per update ({updates} per step): {per_update:,} completions, {per_update // gpus:,} per GPU",
        f"per micro-batch and GPU: at most {tokens:,} tokens; a prompt and its completion have at most {longest:,}",
        f"per pass over the {problems:,} training problems: {problems // prompts:,} steps",
    ]


def run_script(config: RunConfig, overrides: Overrides) -> str:
    """Return run.sh for verl's settings `overrides`; an MLflow server of the environment precedes `tracking.uri`."""
    uri = '"sqlite:///$HERE/mlflow.db"' if config.tracking.uri is None else shlex.quote(config.tracking.uri)
    variables = {
        "VERL_USE_EXTERNAL_MODULES": config.bounds.method == "band",  # each process of verl imports it
        "MLFLOW_TRACKING_URI": config.tracking.with_mlflow,
    }
    arguments = [
        f'"{key}=$(quoted "$HERE/{value}")"'
        if isinstance(value, InFolder)
        else shlex.quote(f"{key}={hydra_value(value)}")
        for key, value in overrides.items()
    ]
    # Workers on other machines do not inherit the environment of this script.
    prefix = "+ray_kwargs.ray_init.runtime_env.env_vars"
    arguments += [f'"{prefix}.{name}=$(quoted "${name}")"' for name, is_set in variables.items() if is_set]
    return _render("run.sh", module=BAND_MODULE, uri=uri, arguments=arguments, **variables)


def _render(template: str, **values: Any) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("bandpo_cli.exports")
    environment = Environment(
        loader=loader, undefined=StrictUndefined, autoescape=False, keep_trailing_newline=True
    )
    environment.filters["cell"] = lambda text: str(text).replace("|", "\\|").replace("\n", " ")
    return environment.get_template(template).render(version=VERL_VERSION, **values)


REWARD_MODULE = '''"""Reward function of this experiment: the graders and rewards of config.yaml."""

from pathlib import Path

from bandpo_cli.exports.verl_files import load_reward_function

compute_score = load_reward_function(Path(__file__).with_name("config.yaml"))
'''


def cluster_script(name: str, nodes: int, gpus: int) -> str:
    """Return cluster.sh, which starts Ray on several machines, with or without Slurm."""
    return _render("cluster.sh", name=re.sub(r"[^\w.-]", "_", name), nodes=nodes, gpus=gpus)


def package_wheel() -> tuple[str, bytes]:
    """Return file name and content of a wheel of this package, from the files that run.

    An index may not have this version, and an installation has no source tree to build from.
    """
    about = metadata.distribution("bandpo")  # a source tree has the one of its last installation, or PKG-INFO
    text = about.read_text("METADATA") or about.read_text("PKG-INFO") or ""
    fields = re.sub("(?m)^Version: .*", f"Version: {__version__}", text, count=1)
    stem, package = f"bandpo-{__version__}", Path(__file__).parents[1]
    tag = "Wheel-Version: 1.0\nGenerator: bandpo\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    info = {"METADATA": fields, "WHEEL": tag, "entry_points.txt": about.read_text("entry_points.txt") or ""}
    contents = {f"{stem}.dist-info/{name}": text.encode() for name, text in info.items()}
    for path in sorted(package.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            contents[path.relative_to(package.parent).as_posix()] = path.read_bytes()
    record, archive = [f"{stem}.dist-info/RECORD,,"], BytesIO()
    with ZipFile(archive, "w", ZIP_DEFLATED) as file:
        for name, data in contents.items():
            digest = urlsafe_b64encode(sha256(data).digest()).decode().rstrip("=")
            record.append(f"{name},sha256={digest},{len(data)}")
            file.writestr(name, data)
        file.writestr(f"{stem}.dist-info/RECORD", "\n".join(record))
    return f"{stem}-py3-none-any.whl", archive.getvalue()


def readme(config: RunConfig, overrides: Overrides, **values: Any) -> str:
    """Return README.md: how to run the folder, what differs, the batches, and each setting.

    `values` are those of the template: differences, arithmetic, changes, wheel, nodes, gpus.
    """
    settings = [
        (key, value, "; ".join(filter(None, (rule.to and f"`{rule.to}`", rule.reason))))
        for key, value in flatten(config.model_dump(mode="json")).items()
        for name, rule in RULES.items()
        if key == name or key.startswith(f"{name}.")
    ]
    keys = [(key.removeprefix("+"), hydra_value(value)) for key, value in overrides.items()]
    return _render("README.md", method=config.bounds.describe(), settings=settings, overrides=keys, **values)


def hydra_value(value: Any) -> str:
    """Return a value in the syntax of Hydra's overrides, from which it is read back unchanged."""
    if value is None or isinstance(value, bool | int | float):
        return "inf" if value == math.inf else json.dumps(value)
    if isinstance(value, str):
        if _PLAIN.fullmatch(value) and value.lower() not in _RESERVED:
            return value
        escaped = value.replace("\\'", "\\\\'").replace("'", "\\'")
        return f"'{escaped}'"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{hydra_value(item)}" for key, item in value.items()) + "}"
    return "[" + ",".join(map(hydra_value, value)) + "]"


JOINED = "{% for message in messages %}{{ message.content }}{% endfor %}"
"""The chat template that returns the text of the only message."""


def chat_template(config: RunConfig, problems: Sequence[Problem]) -> str | None:
    """Return the value of verl's `custom_chat_template` for these prompts; None for the model's own template.

    The tokenizer decides whether messages are converted by a template, and adds its special tokens to messages that are
    joined. Raise ConfigError if no template gives verl the same token ids.
    """
    model = config.model
    if isinstance(problems[0].prompt, str):
        return JOINED
    if model.prompts == "chat" and not model.chat_template_kwargs:
        return None
    from bandpo_cli.models.load import load_tokenizer
    from bandpo_cli.sampling.prompt_encoding import PromptEncoder

    tokenizer: Any = load_tokenizer(model)
    encoder = PromptEncoder(tokenizer, model.prompts, model.chat_template_kwargs)
    if encoder.applies_template(problems[0]):
        encoder.encode(problems[:1])
        return None
    encoded = encoder.encode(problems)

    def token_ids(template: str, text: str) -> tuple[int, ...]:
        messages = [{"role": "user", "content": text}]
        rendered = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
        return tuple(tokenizer(rendered, add_special_tokens=False)["input_ids"])

    for template in (JOINED, "{{ bos_token }}" + JOINED):
        if all(token_ids(template, prompt.text) == prompt.token_ids for prompt in encoded):
            return template
    raise ConfigError(
        f"model.prompts = {model.prompts!r}: the tokenizer of {model.path} adds special tokens to a text that verl "
        "cannot have in a prompt; use model.prompts=chat"
    )


def problem_table(
    split: str, sets: Mapping[str, Sequence[Problem]], join_messages: bool, schema: pa.Schema | None = None
) -> pa.Table:
    """Return problems by `data_source`, by which verl names its metrics, in verl's layout.

    `split` is train or test. `join_messages` joins the messages of a prompt with blank lines to a single message.
    `schema` has the columns if there may be no problems.
    """
    import pyarrow as pa

    labelled = [(label, problem) for label, problems in sets.items() for problem in problems]
    rows = [
        {
            "data_source": label,
            "prompt": [
                *map(vars, messages_of(joined_text(problem.prompt) if join_messages else problem.prompt))
            ],
            "ability": problem.source,
            "reward_model": {"style": "rule", "ground_truth": problem.answer},
            "extra_info": {"split": split, "index": index, "problem": problem_to_json(problem)},
        }
        for index, (label, problem) in enumerate(labelled)
    ]
    return pa.Table.from_pylist(rows, schema=schema)


def copy_bundled_model(name: str, folder: Path) -> None:
    """Copy a bundled model, and add two tokens to its tokenizer that verl asks every Qwen2 model for.

    verl looks up the newline and the end of a chat turn (`utils/tokenizer/continuous_token.py`) before it has a prompt.
    The model cannot sample them: they are beyond its vocabulary.
    """
    from bandpo_cli.models.load import embedded_model_path

    shutil.copytree(embedded_model_path(name), folder)
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    first = 1 + max(tokenizer["model"]["vocab"].values())
    tokenizer["added_tokens"] += [
        {**tokenizer["added_tokens"][0], "id": first + index, "content": text, "special": special}
        for index, (text, special) in enumerate((("\n", False), ("<|im_end|>", True)))
    ]
    write_json(file, tokenizer)


def problem_to_json(problem: Problem) -> str:
    """Return a problem as JSON; `problem_from_json` is the inverse."""
    prompt = problem.prompt
    messages = prompt if isinstance(prompt, str) else [[item.role, item.content] for item in prompt]
    return json.dumps({**vars(problem), "prompt": messages, "extra": dict(problem.extra)}, ensure_ascii=False)


def problem_from_json(text: str) -> Problem:
    """Return the problem that `problem_to_json` wrote."""
    fields = json.loads(text)
    if not isinstance(fields["prompt"], str):
        fields["prompt"] = tuple(Message(role, content) for role, content in fields["prompt"])
    return Problem(**fields)


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

        `extra_info` is that of a row of `problem_table`, which has the complete problem.
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
        for name, use in self._pool.uses.items():
            if use.error and name not in self._reported:
                self._reported.add(name)
                log.warning("grader '%s' failed on an answer, which counts as wrong: %s", name, use.error)


def load_reward_function(config_file: str | Path) -> RewardFunction:
    """Return the reward function of a configuration file, such as the config.yaml of an exported folder."""
    return RewardFunction(resolve([read_layer(Path(config_file))]))
