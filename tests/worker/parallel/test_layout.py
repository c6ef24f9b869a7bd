"""Who is where in a group, and what its part of the model takes."""

import pytest

from headrace_shared.errors import ConfigError
from headrace_worker.config import EngineConfig
from headrace_worker.models.hf_config import config_from_hf
from headrace_worker.parallel.address import address_toward, interface_of
from headrace_worker.parallel.layout import check_nodes, local_places
from headrace_worker.parallel.member_service import own_config
from headrace_worker.parallel.place import RankPlace
from headrace_worker.parallel.sizes import group_kv_bytes_per_token, kv_bytes_per_token, shard_of, weight_bytes

COMMON = RankPlace(tensor_parallel=2, pipeline_parallel=3, token="t")
MODEL = config_from_hf(
    {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 7,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
)


def test_ranks_of_a_stage_are_neighbours_and_machines_take_them_in_order() -> None:
    places = [place for node in range(2) for place in local_places(COMMON, node, 2, (8, 9) if node == 0 else None)]
    assert [place.rank for place in places] == list(range(6))
    assert [(place.stage, place.tp_rank) for place in places] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert [place.local_rank for place in places] == [0, 1, 2, 0, 1, 2]
    assert [place.rank for place in places if place.is_leader] == [0]
    assert [place.rank for place in places if place.is_sampler] == [4]
    assert [(place.store_fd, place.command_fd) for place in places] == [(8, 9)] + [(None, None)] * 5


def test_what_cannot_be_dealt_out_is_refused_by_the_setting_at_fault() -> None:
    check_nodes(3, 1, 0, "")
    check_nodes(4, 2, 1, "g")
    for arguments, key in (((4, 2, 0, ""), "group"), ((4, 2, 2, "g"), "node_rank"), ((3, 2, 0, "g"), "num_nodes")):
        with pytest.raises(ConfigError) as caught:
            check_nodes(*arguments)
        assert caught.value.key == key


def test_the_ranks_caches_and_weights_make_up_the_whole() -> None:
    shards = [shard_of(rank, COMMON) for rank in range(COMMON.world_size)]
    whole = shard_of(0, RankPlace())
    assert sum(kv_bytes_per_token(MODEL, shard, 2) for shard in shards) == MODEL.kv_bytes_per_token(2)
    assert group_kv_bytes_per_token(MODEL, COMMON, 2) == MODEL.kv_bytes_per_token(2)
    assert weight_bytes(MODEL, whole, 4) == 4 * MODEL.num_parameters
    assert sum(weight_bytes(MODEL, shard, 4) for shard in shards) == pytest.approx(4 * MODEL.num_parameters, abs=16)


def test_repeated_key_value_heads_count_as_often_as_they_are_held() -> None:
    place = RankPlace(tensor_parallel=4)
    assert group_kv_bytes_per_token(MODEL, place, 2) == 2 * MODEL.kv_bytes_per_token(2)


def test_a_node_takes_sizes_from_the_leader_and_keeps_its_own_device() -> None:
    leader = EngineConfig(model="/a/model", device="cuda", dtype="bfloat16", max_sequences=7, num_threads=9)
    own = EngineConfig(model="/b/model", device="cuda:2", dtype="float32", max_sequences=5, num_threads=3)
    merged = own_config(leader, own)
    assert (merged.model, merged.device, merged.num_threads) == ("/b/model", "cuda:2", 3)
    assert (merged.dtype, merged.max_sequences) == ("bfloat16", 7)


def test_the_own_address_is_that_of_the_way_to_the_broker() -> None:
    assert address_toward("nats://user:secret@127.0.0.1:4222, nats://elsewhere:4222") == "127.0.0.1"
    assert interface_of("127.0.0.1") in ("lo", None)
    assert interface_of("192.0.2.77") is None
