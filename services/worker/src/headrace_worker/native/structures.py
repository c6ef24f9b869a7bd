"""The C structures that the kernels take, field by field as in csrc."""

import ctypes


class AttentionShape(ctypes.Structure):
    _fields_ = (
        ("num_heads", ctypes.c_int),
        ("num_kv_heads", ctypes.c_int),
        ("head_dim", ctypes.c_int),
        ("block_size", ctypes.c_int),
        ("scale", ctypes.c_float),
    )


class Sequences(ctypes.Structure):
    _fields_ = (
        ("count", ctypes.c_int),
        ("query_starts", ctypes.c_void_p),
        ("context_lengths", ctypes.c_void_p),
        ("block_table", ctypes.c_void_p),
        ("table_stride", ctypes.c_int64),
    )


class Matrix(ctypes.Structure):
    _fields_ = (
        ("weights", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("num_outputs", ctypes.c_int64),
        ("num_inputs", ctypes.c_int32),
        ("step", ctypes.c_int32),
        ("format", ctypes.c_int32),
    )


class LayerWeights(ctypes.Structure):
    _fields_ = (
        ("qkv", Matrix),
        ("output", Matrix),
        ("gate_up", Matrix),
        ("down", Matrix),
        ("attention_norm", ctypes.c_void_p),
        ("mlp_norm", ctypes.c_void_p),
    )


class ModelShape(ctypes.Structure):
    _fields_ = (
        ("attention", AttentionShape),
        ("hidden_size", ctypes.c_int),
        ("intermediate_size", ctypes.c_int),
        ("num_layers", ctypes.c_int),
        ("epsilon", ctypes.c_float),
        ("vocab_size", ctypes.c_int64),
    )


class Batch(ctypes.Structure):
    _fields_ = (
        ("sequences", Sequences),
        ("num_tokens", ctypes.c_int64),
        ("token_ids", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("slot_stride", ctypes.c_int64),
        ("num_sampled", ctypes.c_int64),
        ("sampled_rows", ctypes.c_void_p),
        ("slots_of_adapters", ctypes.c_void_p),
        ("adapters", ctypes.c_void_p),
        ("num_hidden", ctypes.c_int64),
        ("hidden_rows", ctypes.c_void_p),
        ("hidden", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
    )


class AdapterSite(ctypes.Structure):
    _fields_ = (
        ("a", ctypes.c_void_p),
        ("b", ctypes.c_void_p),
        ("parts", ctypes.c_int32),
    )


class Adapter(ctypes.Structure):
    _fields_ = (
        ("sites", ctypes.c_void_p),
        ("rank", ctypes.c_int32),
        ("scale", ctypes.c_float),
    )
