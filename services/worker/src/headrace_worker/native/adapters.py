"""Adapters in the layout of the kernels (csrc/adapters.h)."""

import ctypes

import torch
from torch import Tensor

from headrace_worker.adapters.weights import AdapterWeights, SitePair
from headrace_worker.models.operations import Site
from headrace_worker.native.linear import TILE
from headrace_worker.native.model import NativeAdapter, by_turns
from headrace_worker.native.structures import Adapter, AdapterSite


def pack_adapter(adapter: AdapterWeights) -> NativeAdapter:
    """Of a model whose sizes the kernels take."""
    sites = (AdapterSite * (len(adapter.layers) * len(Site)))()
    kept: list[object] = [sites]
    for index, layer in enumerate(adapter.layers):
        for site in Site:
            pair = layer[site]
            if pair is not None:
                a, b = pair.a.to(torch.bfloat16).contiguous(), _tiles(pair, site)
                sites[index * len(Site) + site] = AdapterSite(a.data_ptr(), b.data_ptr(), len(pair.b))
                kept += (a, b)
    return NativeAdapter(Adapter(ctypes.addressof(sites), adapter.rank, adapter.scale), tuple(kept))


def _tiles(pair: SitePair, site: Site) -> Tensor:
    """[tiles, rank, TILE] bfloat16, in the order in which the product's own matrix is packed."""
    rows = torch.cat(pair.b).to(torch.bfloat16)
    if site is Site.GATE_UP:
        rows = by_turns(rows)
    return rows.view(-1, TILE, rows.shape[1]).transpose(1, 2).contiguous()
