"""Loading and saving a policy: the trained model, its tokenizer, end tokens, device, dtype, deterministic kernels."""

import copy
import gc
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available
from transformers.utils.logging import disable_progress_bar

from bandpo_cli.config.batch_and_sampling import resolve_engine
from bandpo_cli.config.run import EMBEDDED_MODEL, ModelConfig, RunConfig, dtype_on
from bandpo_cli.errors import UserError, find_out_of_memory, first_line
from bandpo_cli.models import lora, model_files
from bandpo_cli.models.logprobs import TILE_ATTRIBUTE, check_compiler, check_packed_forward, compile_layers
from bandpo_cli.models.model_files import loading_errors, model_error
from bandpo_cli.models.weights import checkpointed_layers, forward_dtype, is_sharded, save_adapter, shard
from bandpo_cli.paths import cached_commit, path_exists, user_path
from bandpo_cli.processes.ranks import SINGLE, Ranks, is_gpu
from bandpo_cli.registries import BUNDLED_MODELS

# transformers passes the second on to FlashAttention's backward pass. NVLS is NCCL's sum within the NVLink switch.
VARIABLES = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "FLASH_ATTENTION_DETERMINISTIC": "1", "NCCL_NVLS_ENABLE": "0",
}  # fmt: skip
"""Environment variables of a run on a GPU. Each rank sets them, and an engine process inherits them."""
# vLLM 0.32 sets the same values in the trainer's process, but after cuBLAS has read its environment.
SHARED_GPU = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}
_NONE = "does not have a deterministic implementation"


def resolved_dtype(config: ModelConfig) -> torch.dtype:
    """Return what `model.dtype` is on this machine."""
    dtype = dtype_on("auto", is_gpu(config.device)) if config.dtype == "auto" else config.dtype
    return cast(torch.dtype, getattr(torch, dtype))


def release_cached_memory() -> None:
    """Return unused GPU memory from torch's caching allocator to the driver, for an engine with another allocator."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        gc.collect()  # objects in reference cycles, such as tracebacks, hold tensors
        torch.cuda.empty_cache()


def embedded_model_path(name: str = EMBEDDED_MODEL) -> Path:
    """Return the Hugging Face folder of a model that the package ships (docs/embedded_model.md)."""
    return Path(__file__).parent / name


@dataclass(frozen=True)
class Policy:
    """The model that is trained, with its tokenizer."""

    model: PreTrainedModel  # the causal language model, in evaluation mode
    tokenizer: Tokenizer
    stop_ids: tuple[int, ...]  # of the tokens that end a completion
    pad_id: int  # of the padding token; the model never attends to it
    commit: str | None = None  # of a model on the hub; None for a folder
    ranks: Ranks = SINGLE  # the processes of the run; a policy that is trained is sharded over several
    is_base: bool = False  # the policy is the model without its adapters (`models.lora`)

    def passes(self) -> AbstractContextManager[PreTrainedModel]:
        """Return a context with the model for passes of this policy: without its adapters if it is the base model."""
        return lora.adapters_disabled(self.model) if self.is_base else nullcontext(self.model)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return torch.device(self.model.device)

    @property
    def rows(self) -> int:
        """Number of token embeddings."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of forward and backward passes."""
        return forward_dtype(self.model)


def model_location(config: ModelConfig) -> str:
    """Return the folder or hub id to load: the shipped folder of a bundled model, else the user's folder or hub id."""
    if config.path in BUNDLED_MODELS:
        return str(embedded_model_path(config.path))
    folder = user_path(config.path)
    return str(folder) if path_exists(folder) else config.path


def _source(config: ModelConfig) -> dict[str, Any]:
    """Return the arguments of transformers' loaders that say what to load; a folder has no revision."""
    location = model_location(config)
    source: dict[str, Any] = {"pretrained_model_name_or_path": location}
    source["trust_remote_code"] = config.trust_remote_code
    if config.revision is not None and not path_exists(Path(location)):
        source["revision"] = config.revision
    return source


def load_policy(
    config: ModelConfig,
    for_training: bool = True,
    ranks: Ranks = SINGLE,
    seed: int = 0,
    model_config: PreTrainedConfig | None = None,
    tokenizer: Tokenizer | None = None,
) -> Policy:
    """Load model and tokenizer onto the configured device; of an adapter, its base model with merged weights.

    The model always stays in evaluation mode: dropout would make π and π_old differ for the same weights. All ranks
    call this together; only a model for training is sharded. Raise UserError if the model cannot be loaded, the
    tokenizer has no end-of-sequence token, or the model cannot be trained with these settings.

    Args:
        for_training: also check that the packed forward pass gives the same log-probs as the ordinary one, and enable
            gradient checkpointing and add adapters to train (LoRA) if that is configured.
        seed: seed of the run, for the initial adapters.
        model_config, tokenizer: what `read_config` and `load_tokenizer` have returned for the model; None to read them.
    """
    attention, device = _attention(config), _device(config.device, ranks)
    # cuDNN builds a plan for each new shape, and lengths are always new. For the process, since the recomputation in a
    # backward pass must choose the kernel of the forward pass.
    torch.backends.cuda.enable_cudnn_sdp(False)
    if config.compile:
        check_compiler(device)
    given, (config, adapter) = config, model_files.base_config(config)
    model_config = read_config(config) if model_config is None else model_config
    tokenizer = load_tokenizer(given) if tokenizer is None else tokenizer
    folder = Path(model_location(config))
    if path_exists(folder):
        location, commit = str(folder.absolute()), None
    else:  # a repository that changes in between gives no mixture of two commits
        location, commit = config.path, cached_commit(config.path, "model", config.revision)
        config = config.model_copy(update={"revision": commit or config.revision})
    model = _load(config, model_config, attention)
    if adapter is not None:
        model_files.merge_adapter(model, adapter)
    stop_ids, pad_id = _special_ids(model, tokenizer, config.path)
    model.eval()
    if for_training:
        if uses_gradient_checkpointing(model, config, device.type == "cuda"):
            # transformers 5.23 renamed the method, and prints a warning for the old name.
            new_name = getattr(model, "activation_checkpointing_enable", None)
            (new_name or model.gradient_checkpointing_enable)({"use_reentrant": False})
            model.disable_input_require_grads()  # only reentrant checkpointing needs inputs that require gradients
        if config.lora is not None:
            lora.add_adapters(model, config.lora, seed, location, commit)
    if config.compile:
        compile_layers(model)
    if for_training and ranks.size > 1:
        shard(model, ranks, device)
    else:
        model.to(device)
    if for_training:
        check_packed_forward(model)
    return Policy(model, tokenizer, stop_ids, pad_id, commit, ranks)


def read_config(config: ModelConfig) -> PreTrainedConfig:
    """Return the config.json of a model that is no adapter, after a check of the folder's files.

    Raises:
        UserError: the folder is no model folder, its weights are quantized, or transformers does not support the model.
    """
    source = _source(config)
    if config.path not in BUNDLED_MODELS:  # whose files come with the package
        model_files.check_model_files(source["pretrained_model_name_or_path"], config.path)
    with loading_errors(config.path, "its config cannot be read"):
        loaded = AutoConfig.from_pretrained(**source)
    # the loader would ask for another package
    if quantization := getattr(loaded, "quantization_config", None):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        problem = f"its weights are quantized ({method!r:.40}), which cannot be trained"
        raise model_error(config.path, f"{problem}; name the model with weights of 16 or 32 bits")
    return loaded


def load_tokenizer(config: ModelConfig) -> Tokenizer:
    """Return the model's tokenizer, of an adapter its own or that of its base. Raise UserError if none is usable."""
    base, adapter = model_files.base_config(config)
    source = _source(config if adapter is None or path_exists(adapter / "tokenizer_config.json") else base)
    folder = Path(source["pretrained_model_name_or_path"])
    # tokenizer.json, vocab.json, spiece.model, tokenization_custom.py, ...
    if path_exists(folder) and not any(next(folder.glob(n), None) for n in ("*token*", "*vocab*", "*.model")):
        files = "tokenizer.json and tokenizer_config.json"
        raise model_error(config.path, f"it has no tokenizer; copy {files} of the model there")
    with loading_errors(config.path, "its tokenizer cannot be read"):
        tokenizer: Tokenizer = AutoTokenizer.from_pretrained(**source)
        ids = tokenizer("1+1=2")["input_ids"]
        if not ids or not isinstance(tokenizer.decode(ids), str):
            raise model_error(config.path, "its tokenizer gives no tokens; is tokenizer.json there?")
    return tokenizer


def meta_model(config: ModelConfig, model_config: PreTrainedConfig, **options: Any) -> PreTrainedModel:
    """Return the model of a config.json on the meta device, after a check of the size of the stored weights.

    `options` are those of transformers' `from_config`, such as its dtype.
    """
    options["trust_remote_code"] = config.trust_remote_code
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(model_config, **options)
    model_files.check_declared_size(model, model_location(config), config.path)
    return model


def _load(config: ModelConfig, model_config: PreTrainedConfig, attention: str | None) -> PreTrainedModel:
    """Return the model on the CPU, after checks of its weights."""
    if config.path not in BUNDLED_MODELS:
        model_files.check_weight_format(model_location(config), config.path)
    disable_progress_bar()  # its progress bars would disturb the run's live view
    logger = logging.getLogger("transformers.modeling_utils")
    with loading_errors(config.path):
        if not (config.trust_remote_code and getattr(model_config, "auto_map", None)):
            meta_model(config, model_config)  # custom code may fail on the meta device
        # The loader's table of weights that do not match; the error message names one of them. Not the logger's level,
        # on which the loader's other checks and messages depend.
        logger.disabled = True
        try:
            options = _source(config) | {"dtype": resolved_dtype(config), "attn_implementation": attention}
            # check_loaded_weights refuses mismatched sizes, with the others
            flags = ("use_safetensors", "ignore_mismatched_sizes", "output_loading_info")
            model: PreTrainedModel
            model, info = AutoModelForCausalLM.from_pretrained(**options, **dict.fromkeys(flags, True))
        finally:
            logger.disabled = False
        model_files.check_loaded_weights(model, info, config.path)
        if config.head != "auto":
            setattr(model.get_output_embeddings(), TILE_ATTRIBUTE, config.head << 20)
    return model


def load_reference(policy: Policy, config: ModelConfig) -> Policy:
    """Return the policy, before its first update, without gradients: the reference of the KL penalty.

    With LoRA it is the policy's own model, without its adapters in passes. A sharded model is loaded again.
    """
    if lora.has_adapters(policy.model):
        return replace(policy, is_base=True)
    if not is_sharded(policy.model):
        return replace(policy, model=copy.deepcopy(policy.model).requires_grad_(False))
    if policy.commit is not None:
        config = config.model_copy(update={"revision": policy.commit})
    model = _load(config, read_config(config), _attention(config))
    shard(model.eval().requires_grad_(False), policy.ranks, policy.device)
    return replace(policy, model=model)


def save_policy(policy: Policy, folder: Path, weights: Mapping[str, Tensor] | None = None) -> None:
    """Write a folder that transformers and vLLM can load: weights, or with LoRA adapters for peft, and tokenizer.

    Args:
        weights: what `weights_to_save` returns, or a copy; None for the weights in use.
    """
    if lora.has_adapters(policy.model):
        save_adapter(policy.model, folder, weights)
    else:
        policy.model.save_pretrained(folder, state_dict=None if weights is None else dict(weights))
        if is_sharded(policy.model):
            # transformers states the dtype of the parameters, and the weights are rounded.
            policy.model.config.dtype = policy.dtype
            policy.model.config.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)


def _device(name: str, ranks: Ranks = SINGLE) -> torch.device:
    """Return the device that `model.device` names: with several ranks, `auto` and `cuda` are the GPU of this rank."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and ranks.size > 1:
        name = f"cuda:{ranks.local_rank}"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        if find_out_of_memory(error):  # another process may hold all of its memory
            raise
        raise UserError(f"model.device = {name!r}: not usable on this machine: {first_line(error)}") from None
    return device


def _attention(config: ModelConfig) -> str | None:
    """Return the attention implementation for transformers, or None for its default: sdpa if the model supports it."""
    chosen = config.attention
    kernels = {
        "flash_attention_2": ("the package flash-attn and a GPU for it", is_flash_attn_2_available),
        "flash_attention_3": ("the package flash-attn-3 and a GPU for it", is_flash_attn_3_available),
        "varlen": ("a GPU", lambda: is_gpu(config.device)),
    }
    if chosen in kernels:
        needed, is_available = kernels[chosen]
        problem = None if is_available() else f"needs {needed}, which this machine lacks; set "
        if problem is None and resolved_dtype(config) == torch.float32:
            problem = "does not support float32; set model.dtype=bfloat16 or "
        if problem:
            raise UserError(f"model.attention = {chosen!r} {problem}model.attention=sdpa")
    return None if chosen == "auto" else chosen


def uses_gradient_checkpointing(model: PreTrainedModel, config: ModelConfig, on_gpu: bool) -> bool:
    """Return whether the model is trained with gradient checkpointing if its architecture can.

    An `auto` for which the estimate of the memory has chosen nothing, since it has none, is true on a GPU.

    Raises:
        UserError: the setting is true, and the architecture has none that works outside of training mode.
    """
    supported, setting = bool(checkpointed_layers(model)), config.gradient_checkpointing
    if setting is True and not supported:
        kind = model.config.model_type
        raise UserError(f"model.gradient_checkpointing: {kind} models do not support it; set it to false")
    return supported and (on_gpu if setting == "auto" else setting)


def _special_ids(model: PreTrainedModel, tokenizer: Tokenizer, path: str) -> tuple[tuple[int, ...], int]:
    """Return the end-of-sequence ids of the model's generation config and its tokenizer, and the padding id."""
    eos = model.generation_config and model.generation_config.eos_token_id
    ids = [*eos] if isinstance(eos, (list, tuple)) else [eos]
    stop_ids = [i for i in (*ids, tokenizer.eos_token_id) if i is not None]
    if not stop_ids:
        files = "tokenizer_config.json (eos_token), or by id in its generation_config.json (eos_token_id)"
        raise model_error(path, f"its tokenizer has no end-of-sequence token; name one in its {files}")
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else stop_ids[0]
    rows = model.get_input_embeddings().weight.shape[0]
    for i in (*stop_ids, pad_id):
        if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < rows:
            raise model_error(path, f"its end or padding token {i!r} is not one of its {rows:,} tokens")
    if tokenizer.vocab_size > rows:
        raise model_error(path, f"its tokenizer has {tokenizer.vocab_size:,} tokens, the model has {rows:,}")
    return tuple(dict.fromkeys(stop_ids)), pad_id


@contextmanager
def deterministic_kernels(config: RunConfig, training: bool = True) -> Iterator[None]:
    """Use deterministic kernels in the block (the setting `deterministic`); enter it before torch uses the GPU.

    Raise UserError if this process already uses other kernels, vLLM has no such kernels here, or torch has none for an
    operation of the model or of custom code.
    """
    _prepare_determinism(config, training)
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)  # not `warn_only`, with which attention stays non-deterministic
    try:
        yield
    except RuntimeError as error:
        if _NONE not in str(error):
            raise
        operation = first_line(error).partition(" does not")[0]
        raise UserError(f"deterministic = true: {operation} {_NONE}; set deterministic=false") from error
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


def _prepare_determinism(config: RunConfig, training: bool) -> None:
    """Set the environment variables of a GPU; raise UserError where the results would not be deterministic."""
    on_gpu, sampling = is_gpu(config.model.device), config.sampling
    shares = not (sampling.max_lag and sampling.engine_process)
    with_vllm, problem = resolve_engine(config.sampling.engine, on_gpu) == "vllm", None
    if on_gpu:
        variables = VARIABLES | ({"VLLM_BATCH_INVARIANT": "1"} if with_vllm else {})
        variables |= SHARED_GPU if with_vllm and shares else {}
        is_late = torch.cuda.is_initialized() or "vllm" in sys.modules  # type: ignore[no-untyped-call]
        for name in ("VLLM_BATCH_INVARIANT", *SHARED_GPU) if is_late else ():
            if name in variables and os.environ.get(name) != variables[name]:
                set_late = f"this process has used the GPU or vLLM without {name}={variables[name]}"
                raise UserError(f"deterministic = true: {set_late}; start a new one")
        os.environ.update(variables)
        # On GPUs of compute capability 8, vLLM replaces torch's matrix products by kernels without a gradient.
        least = 9 if training and shares else 8
        if with_vllm and torch.cuda.get_device_capability()[0] < least:
            where = "in the trainer's process " if least == 9 else ""
            problem = f"vLLM {where}needs a GPU of compute capability {least}.0 or more"
    elif with_vllm and (config.task.functions or config.grading.while_sampling):
        reason = "they on the time that tools and graders take"
        problem = f"on a CPU, vLLM's results depend on its batches, and {reason}"
    if problem is not None:
        advice = "use --sampler transformers, or leave out deterministic"
        raise UserError(f"deterministic = true: {problem}; {advice}")
