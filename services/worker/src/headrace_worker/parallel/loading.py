"""Loads an engine: of a whole model, or one rank's part of it."""

import torch

from headrace_shared.errors import ConfigError
from headrace_shared.fleet_messages import ModelCard
from headrace_shared.machine import num_cores
from headrace_worker import engine as whole
from headrace_worker.config import EngineConfig, check_model, with_defaults
from headrace_worker.cuda.backend import Backend
from headrace_worker.cuda.build import build_engine
from headrace_worker.cuda.load import cuda_backend, sizes_of
from headrace_worker.forward import TorchForward
from headrace_worker.iteration import Engine, Report
from headrace_worker.kv_cache import KVCache
from headrace_worker.memory import WORKSPACE_BYTES, check_room, planned_blocks
from headrace_worker.models.checkpoint import Checkpoint, open_model
from headrace_worker.models.linear import TorchPacking
from headrace_worker.models.reading import read_decoder
from headrace_worker.models.source import find_model
from headrace_worker.parallel.device_stage import DeviceStage
from headrace_worker.parallel.place import RankPlace
from headrace_worker.parallel.sizes import group_kv_bytes_per_token, kv_bytes_per_token, shard_of, weight_bytes
from headrace_worker.parallel.stage_forward import StageForward
from headrace_worker.parallel.torch_group import TorchGroup
from headrace_worker.pooling import Pooling, last_norm
from headrace_worker.torch_engine import TorchEngine


def load(config: EngineConfig, report: Report) -> Engine:
    """Raises ConfigError, with one line for the user, if that cannot work; PeerLost if another rank is gone."""
    if config.place.world_size == 1:
        return whole.load(config, report)
    device = _own_device(whole.find_device(config.device), config.place)
    config = with_defaults(config, on_gpu=device.type == "cuda")
    return load_rank(config, TorchGroup.open(config.place, device), device, report)


def load_rank(config: EngineConfig, group: TorchGroup, device: torch.device, report: Report) -> Engine:
    """One rank's part, loaded at the same time as the others'."""
    check_settings(config, device)
    place = config.place
    dtype = whole.find_dtype(config.dtype, device)
    torch.set_num_threads(max(1, (config.num_threads or num_cores()) // place.num_local_ranks))
    checkpoint, name = _open(config, group, report)
    model = checkpoint.config
    check_model(config, model)
    group.shard.check(model)
    group.check_same("dtype", "number format", str(dtype))
    group.check_same("model", "architecture", str(model))
    if device.type == "cuda":
        backend = cuda_backend(config, device, model.vocab_size)
        return load_on_device(config, checkpoint, name, group, backend, dtype, report)
    return _load_on_cpu(config, checkpoint, name, group, dtype, report)


def load_on_device(
    config: EngineConfig,
    checkpoint: Checkpoint,
    name: str,
    group: TorchGroup,
    backend: Backend,
    dtype: torch.dtype,
    report: Report,
) -> Engine:
    """One rank's part on a device that has kernels of its own."""
    if config.speculative_tokens:
        raise ConfigError("speculative_tokens", "drafts are verified on CPUs only")
    return build_engine(
        checkpoint.config,
        checkpoint.source,
        backend,
        sizes_of(config, checkpoint.config.context),
        lambda context: _card(config, checkpoint, name, context, report),
        dtype=dtype,
        shard=group.shard,
        communicator=group,
        forward_of=lambda decoder, attention: DeviceStage(decoder, attention, group, dtype),
        agree=lambda num_blocks: group.smallest("blocks", num_blocks),
        report=report,
    )


def _load_on_cpu(
    config: EngineConfig, checkpoint: Checkpoint, name: str, group: TorchGroup, dtype: torch.dtype, report: Report
) -> Engine:
    device, model, shard = torch.device("cpu"), checkpoint.config, group.shard
    kv_bytes = group_kv_bytes_per_token(model, config.place, dtype.itemsize)
    num_blocks = group.smallest("blocks", planned_blocks(config, kv_bytes))
    # Nobody reads weights before everybody has seen how much memory there is.
    group.smallest("fits", int(_check_memory(config, checkpoint, num_blocks, dtype, device)))
    weights = read_decoder(
        model,
        checkpoint.source,
        TorchPacking(folds_norms=True),
        shard=shard,
        dtype=dtype,
        device=device,
        report=lambda done, total: report("loading weights", done, total),
    )
    cache = KVCache.of_model(
        model, num_blocks=num_blocks, block_size=config.block_size, dtype=dtype, device=device, shard=shard
    )
    context = min(model.context, config.context or model.context, num_blocks * config.block_size)
    forward = TorchForward(weights, group, cache, context)
    return TorchEngine(
        StageForward(forward, group, hidden_size=model.hidden_size, dtype=dtype, device=device),
        cache,
        _card(config, checkpoint, name, context, report),
        context=context,
        max_sequences=config.max_sequences,
        tokens_per_iteration=config.tokens_per_iteration,
        device=device,
        dtype=dtype,
        samples=config.place.is_sampler,
        max_drafts=config.speculative_tokens,
        pooling=Pooling(model.hidden_size, last_norm(model, checkpoint.source), device),
    )


def check_settings(config: EngineConfig, device: torch.device) -> None:
    """Raises ConfigError for what only an engine of one rank can do."""
    if config.deterministic and device.type == "cpu":
        raise ConfigError("deterministic", "not with several ranks on CPUs")
    if config.deterministic and config.place.tensor_parallel > 1:
        # The order in which NCCL adds up the ranks' products depends on how many bytes there are.
        raise ConfigError("deterministic", "not with tensor_parallel above 1")
    if config.speculative_tokens and config.place.pipeline_parallel > 1:
        # A draft follows a token that is known, but the stages compute several iterations at a time.
        raise ConfigError("speculative_tokens", "not with pipeline_parallel above 1")
    if config.quantization != "none":
        raise ConfigError("quantization", "not with several ranks")


def _own_device(first: torch.device, place: RankPlace) -> torch.device:
    """Each rank of a machine has a GPU of its own, from `first` on. Raises ConfigError."""
    if first.type != "cuda":
        return first
    index = (first.index or 0) + place.local_rank
    if index >= torch.cuda.device_count():
        raise ConfigError("device", f"{place.num_local_ranks} ranks need as many GPUs from {first} on")
    return torch.device("cuda", index)


def _open(config: EngineConfig, group: TorchGroup, report: Report) -> tuple[Checkpoint, str]:
    """The checkpoint and the model's name. Of the ranks of a machine one goes first: it may have to download."""
    report("finding the model", 0, 1)
    if config.place.local_rank:
        group.wait_for_first_here("found")
    files = find_model(config.model, lambda done, total: report("downloading", done, total))
    if not config.place.local_rank:
        group.done_here("found")
    checkpoint = open_model(files, config.generation_config)
    report("finding the model", 1, 1)
    return checkpoint, config.served_name or files.name


def _check_memory(
    config: EngineConfig, checkpoint: Checkpoint, num_blocks: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """True. Raises ConfigError where the ranks of this machine need more than it has."""
    model, place = checkpoint.config, config.place
    first = place.rank - place.local_rank
    weights = cache = 0
    for rank in range(first, first + place.num_local_ranks):
        shard = shard_of(rank, place)
        weights += weight_bytes(model, shard, dtype.itemsize)
        cache += num_blocks * config.block_size * kv_bytes_per_token(model, shard, dtype.itemsize)
    check_room(f"{place.num_local_ranks} ranks need", weights, cache, place.num_local_ranks * WORKSPACE_BYTES, device)
    return True


def _card(config: EngineConfig, checkpoint: Checkpoint, name: str, context: int, report: Report) -> ModelCard:
    """The leader's goes to the routers; the others need no tokenizer."""
    if not config.place.is_leader:
        vocab_size = checkpoint.config.vocab_size
        return ModelCard(model=name, tokenizer=b"", vocab_size=vocab_size, context=context, eos_token_ids=())
    report("reading the tokenizer", 0, 1)
    card = checkpoint.make_card(name, context)
    report("reading the tokenizer", 1, 1)
    return card
