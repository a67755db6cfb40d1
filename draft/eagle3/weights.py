"""From a draft's directory to a drafter: what it shares with the target, and whether it fits it at all."""

from __future__ import annotations

from pathlib import Path

import torch

from draft.base import TargetShape
from draft.eagle3.config import Eagle3Config, FullHeads
from draft.eagle3.drafter import Eagle3Drafter
from draft.eagle3.model import Eagle3Model
from draft.eagle3.spellings import names_in_file
from engine.attention.backend import AttentionBackend
from engine.comm.parallel_state import ParallelState
from engine.json_files import read_json
from engine.kernels.table import Kernels
from engine.layers.dummy import fill_dummy
from engine.layers.embedding import Embedding, LMHead
from engine.loading.progress import LoadProgress
from engine.loading.shared_reads import gather_if_faster
from engine.loading.weights import Checkpoint, CheckpointError
from engine.log import logger

GPU_HEAD_DIMS = (32, 64, 128)
GPU_LATENT_WIDTHS = {"kv_lora_rank": 64, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
"""Name -> the least width; all are powers of two."""
PASSED_OVER = ("midlayer.self_attn.rotary_emb.inv_freq",)  # some exports hold what the config says already


def load(
    directory: str | Path,
    target: TargetShape,
    parallel: ParallelState,
    dtype: torch.dtype,
    *,
    kernels: Kernels,
    backend: AttentionBackend,
    embed: Embedding,
    lm_head: LMHead,
    layer_id_offset: int = 0,
    dummy_seed: int | None = None,
    progress: LoadProgress | None = None,
) -> Eagle3Drafter:
    """This rank's share of the draft; on the meta device everything is checked and no weight is read.

    embed, lm_head: the target's, used where the draft has none of its own. layer_id_offset: -1, 0 or 1, added to the
    layers that the config names. With `dummy_seed` no weight file is read: the weights are made up, with a head of its
    own (unless tied) and the target's embedding. progress: counts the bytes that are read. Raises ValueError in one
    sentence, CheckpointError of the files' tensors.
    """
    config = Eagle3Config.from_dict(read_json(Path(directory) / "config.json"))
    config.check_target(target)
    if kernels.needs_powers_of_two:
        _check_head_widths(config)
    feature_layers = config.layer_ids.moved(layer_id_offset).before(target.num_layers)

    def build(has_embedding: bool, has_head: bool) -> Eagle3Model:
        return Eagle3Model(
            config, parallel, dtype, kernels=kernels, backend=backend, has_embedding=has_embedding, has_head=has_head
        )

    if dummy_seed is None:
        model = _load_checkpoint(Path(directory), config, parallel, build, progress)
    else:
        model = build(False, not config.tie_word_embeddings)
        fill_dummy(model, dummy_seed)
    embed = model.embed_tokens or embed
    _log(config, model, feature_layers, target)
    return Eagle3Drafter(model, feature_layers, embed, _head(model, embed, lm_head))


def _load_checkpoint(
    directory: Path, config: Eagle3Config, parallel: ParallelState, build, progress: LoadProgress | None
) -> Eagle3Model:
    checkpoint = Checkpoint(directory)
    try:
        names = names_in_file(checkpoint.tensors)
    except CheckpointError as error:
        raise CheckpointError(f"{directory}: {error}") from error
    for name in PASSED_OVER:
        checkpoint.tensors.pop(names.pop(name, None), None)
    # By names in the header alone, so that all ranks decide alike.
    has_head = "lm_head.weight" in names or config.has_reduced_vocabulary
    model = build("embed_tokens.weight" in names, has_head and not config.tie_word_embeddings)
    specs = {names.get(name, name): spec for name, spec in model.specs(set(names)).items()}
    checkpoint.check(specs)
    if parallel.device.type != "meta":
        checkpoint.load(specs, parallel.device, progress, gather_if_faster(parallel), parallel.is_alone)
    return model


def _head(model: Eagle3Model, embed: Embedding, lm_head: LMHead) -> LMHead:
    """The draft's own, its embedding where they are tied, else the target's."""
    if model.lm_head is not None:
        return model.lm_head
    if not model.config.tie_word_embeddings:
        return lm_head
    return LMHead(
        model.config.vocab_size, model.config.hidden_size, model.parallel, model.dtype, model.kernels, embed.weight
    )


def _check_head_widths(config: Eagle3Config) -> None:
    heads = config.heads
    if isinstance(heads, FullHeads):
        if heads.head_dim not in GPU_HEAD_DIMS:
            raise ValueError(
                f"the draft's head_dim={heads.head_dim} is none of {', '.join(map(str, GPU_HEAD_DIMS))}, as bfloat16 "
                "on a GPU needs; use dtype float32."
            )
        return
    for name, least in GPU_LATENT_WIDTHS.items():
        width = getattr(heads, name)
        if width & (width - 1) or width < least:
            raise ValueError(
                f"the draft's {name}={width} is no power of two from {least} on, as bfloat16 on a GPU needs; use dtype "
                "float32."
            )


def _log(config: Eagle3Config, model: Eagle3Model, feature_layers: tuple[int, ...], target: TargetShape) -> None:
    if model.parallel.rank != 0 or model.parallel.device.type == "meta":
        return
    ids, convention = config.layer_ids.ids, config.layer_ids.convention_of(target.num_layers)
    logger.info(
        "EAGLE-3 draft: captures the states before layers %s (layer ids %s, read as %s of a layer), %s embedding, %s "
        "head over %d of %d tokens",
        list(feature_layers),
        "by default" if ids is None else list(ids),
        convention,
        "the target's" if model.embed_tokens is None else "its own",
        "its own" if model.lm_head is not None else "tied" if config.tie_word_embeddings else "the target's",
        config.draft_vocab_size,
        config.vocab_size,
    )
