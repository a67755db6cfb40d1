"""From a checkpoint directory to a loaded model: naming variants, expert storage, and what is passed over."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from engine.attention.backend import AttentionBackend
from engine.comm.collectives import agree_on_minimum
from engine.comm.parallel_state import ParallelState
from engine.config import ConfigError
from engine.expert_map import ExpertMap
from engine.kernels.table import Kernels
from engine.layers.dummy import fill_dummy
from engine.layers.expert_check import BOUNDS, largest_error
from engine.layers.quant import MATRICES, detect_storage
from engine.loading.checkpoint_headers import without_collection
from engine.loading.prepared.weights import Preparation, PreparedWeights
from engine.loading.progress import LoadProgress
from engine.loading.shared_reads import gather_if_faster
from engine.loading.weights import Checkpoint, CheckpointError, TensorSpec
from engine.log import logger
from models.kimi_k25.config import KimiConfig
from models.kimi_k25.model import VISION_PREFIXES, KimiModel
from models.kimi_k25.prepared import prepared_weights
from models.kimi_k25.sizes import held_as

WRAPPER_PREFIX = "language_model."


@dataclass(frozen=True)
class OpenedModel:
    """This rank's share, built, beside the checkpoint whose headers agree with it: all but to read the weights.

    specs: what the model wants of each tensor. prefix: of the text model's names. storage: of the checkpoint's experts.
    index_seconds, build_seconds: what reading all headers took, and what building and comparing took."""

    model: KimiModel
    checkpoint: Checkpoint
    specs: dict[str, TensorSpec]
    prefix: str
    storage: str
    index_seconds: float
    build_seconds: float

    def load(
        self, self_test: bool = False, progress: LoadProgress | None = None, preparation: Preparation | None = None
    ) -> bool:
        """Reads the weights into the model. self_test: INT4 experts then show that they compute what matrices say.
        progress: counts the bytes that are read. preparation: prepared weights are taken from there where they fit, and
        else left there once all is well; every rank must have one, or none. Whether they were taken.

        Raises CheckpointError naming file and tensor, ConfigError for a self-test that fails."""
        parallel, gather, prepared, was_taken = self.model.parallel, gather_if_faster(self.model.parallel), None, False
        progress = progress or LoadProgress()
        if preparation is not None:
            prepared = prepared_weights(preparation, self.model, self.checkpoint, self.storage)
            was_taken = prepared.load(progress) and self._are_sound(prepared, self_test)
            progress.meet("prepared weights are read")
            if not agree_on_minimum(int(not was_taken), parallel):
                gather = None  # a rank has its weights, and would not read with the others
        if not was_taken:
            self.checkpoint.load(self.specs, parallel.device, progress, gather, parallel.is_alone)
            self._test(self_test)
        if prepared is not None:
            progress.meet("the model is read")
            agree_on_minimum(0, parallel)  # that all have loaded: no rank's time to load counts as one's to write
            if not was_taken:
                prepared.store(progress)
        return was_taken

    def _are_sound(self, prepared: PreparedWeights, self_test: bool) -> bool:
        """Whether what was taken passes the test that a checkpoint's weights must pass."""
        try:
            self._test(self_test)
        except ConfigError as error:
            logger.warning(
                "prepared weights: %s is not used: %s; reading the checkpoint instead.", prepared.path, error
            )
            return False
        return True

    def _test(self, self_test: bool) -> None:
        if self_test and self.storage == "int4" and self.model.config.moe_layers:
            _test_experts(self.model, self.checkpoint, self.specs, self.prefix)


def load_model(
    directory: str,
    config: KimiConfig,
    parallel: ParallelState,
    dtype: torch.dtype,
    *,
    dummy_seed: int | None = None,
    self_test: bool = False,
    progress: LoadProgress | None = None,
    preparation: Preparation | None = None,
    checkpoint: Checkpoint | None = None,
    **choices: Any,
) -> KimiModel:
    """This rank's share of the model with its weights; on the meta device everything is checked and no weight is read.
    checkpoint, choices, errors: as of `open_model`; self_test, progress,
    preparation: as of `OpenedModel.load`.

    With `dummy_seed` no file is read: the weights are made up, the same for the same seed, experts in the storage that
    the config claims."""
    if dummy_seed is not None:
        model = _builder(config, parallel, dtype, **choices)("int4" if config.is_quantized else "float")
        fill_dummy(model, dummy_seed)
        return model
    opened = open_model(directory, config, parallel, dtype, checkpoint, **choices)
    if parallel.device.type != "meta":
        opened.load(self_test, progress, preparation)
    return opened.model


def open_model(
    directory: str,
    config: KimiConfig,
    parallel: ParallelState,
    dtype: torch.dtype,
    checkpoint: Checkpoint | None = None,
    **choices: Any,
) -> OpenedModel:
    """Reads and checks all headers and builds this rank's share. checkpoint: the directory's, where its headers have
    been read already. choices: of `_builder`.

    Raises CheckpointError naming file and tensor, ValueError with the sum where the model does not divide over the
    ranks."""
    build = _builder(config, parallel, dtype, **choices)
    began = time.monotonic()
    with without_collection():
        checkpoint = checkpoint or Checkpoint(directory)
        storage = _find_storage(checkpoint, parallel.rank == 0 and parallel.device.type != "meta")
        _check_counts(config, len(checkpoint.tensors))
        indexed = time.monotonic()
        model = build(storage)
        prefix = WRAPPER_PREFIX if any(name.startswith(WRAPPER_PREFIX) for name in checkpoint.tensors) else ""
        specs = model.specs(prefix)
        checkpoint.check(specs)
    return OpenedModel(model, checkpoint, specs, prefix, storage, indexed - began, time.monotonic() - indexed)


def _builder(
    config: KimiConfig,
    parallel: ParallelState,
    dtype: torch.dtype,
    *,
    backend: AttentionBackend,
    kernels: Kernels,
    shards_tokens: bool,
    expert_map: ExpertMap | None = None,
    counts_experts: bool = False,
) -> Callable[[str], KimiModel]:
    """What makes the model, without weights, from how the checkpoint holds its experts. Raises ValueError."""
    if kernels.needs_powers_of_two:
        _check_head_widths(config)

    def build(storage: str) -> KimiModel:
        return KimiModel(
            config,
            parallel,
            dtype,
            backend=backend,
            kernels=kernels,
            expert_storage=held_as(storage, config, parallel, kernels.reads_packed_experts),
            shards_tokens=shards_tokens,
            expert_map=expert_map,
            counts_experts=counts_experts,
        )

    return build


def _check_head_widths(config: KimiConfig) -> None:
    for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
        width = getattr(config, name)
        if width & (width - 1) or width < 16:
            raise ValueError(
                f"{name}={width} is no power of two from 16 on, as bfloat16 on a GPU needs; use dtype float32."
            )


def _find_storage(checkpoint: Checkpoint, tells: bool) -> str:
    """How the routed experts are stored; leaves the checkpoint with the text model's tensors alone."""
    skipped = checkpoint.skip(VISION_PREFIXES)
    if skipped and tells:
        logger.info("%d tensors of %s passed over: this engine serves text only", skipped, ", ".join(VISION_PREFIXES))
    try:
        return detect_storage(checkpoint.tensors)
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.directory}: {error}") from error


@torch.inference_mode()
def _test_experts(model: KimiModel, checkpoint: Checkpoint, specs: dict[str, TensorSpec], prefix: str) -> None:
    """The last expert of the last layer, at whose offsets an overflow would show. Raises ConfigError."""
    started, layer = time.monotonic(), model.config.moe_layers[-1]
    feed_forward = model.layers[layer].feed_forward
    experts, slot = feed_forward.experts, feed_forward.experts.local[-1]
    expert = slot if feed_forward.slots is None else feed_forward.slots[slot]
    matrices = {}
    for matrix in MATRICES:
        name = f"{prefix}model.layers.{layer}.mlp.experts.{expert}.{matrix}.weight"
        halves = (f"{name}_packed", f"{name}_scale")
        matrices[matrix] = tuple(checkpoint.read(half, specs[half]) for half in halves)
    last, top_k = len(experts.local) - 1, model.config.num_experts_per_tok
    error, bound = largest_error(experts, last, matrices, model.dtype, top_k), BOUNDS[model.dtype]
    if not error <= bound:
        raise ConfigError(
            f"self-test: the INT4 product of layer {layer}, expert {expert} on {model.parallel.device} is off by "
            f"{error:.2g} of its size, and rounding explains {bound:g}: the kernel is wrong on this device, or weights "
            "were damaged on their way; use dtype float32, or --no-self-test to start all the same."
        )
    if model.parallel.rank == 0:
        seconds = time.monotonic() - started
        logger.info("self-test: an INT4 expert is as its matrices say, to %.1g (%.2f s)", error, seconds)


def _check_counts(config: KimiConfig, num_tensors: int) -> None:
    """A config of far more layers or experts than the files hold would take hours to compare with them."""
    moe_layers = max(config.num_hidden_layers - config.first_k_dense_replace, 0)
    if max(config.num_hidden_layers, moe_layers * config.n_routed_experts) > num_tensors:
        raise CheckpointError(
            f"config.json: num_hidden_layers={config.num_hidden_layers} and n_routed_experts={config.n_routed_experts} "
            f"ask for more than the {num_tensors} tensors of the checkpoint."
        )
