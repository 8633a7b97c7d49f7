"""Pages on a device and in HiCache's host memory, as SGLang makes and copies them, without a server."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from pdserve.engine.device import Device
from pdserve.kvpool.client.config import PoolClientConfig
from pdserve.kvpool.hicache.host_pool import HostPool
from pdserve.kvpool.hicache.page_access import RankPages
from pdserve.pages import KV

PAGE_TOKENS: Final = 64
LAYERS, HEADS, HEAD_DIM = 4, 2, 128
DEVICE_PAGES, HOST_PAGES = 12, 24
USED: Final = (7, 2, 3, 9, 5)
"""Pages of the device, in this order. The others stay as they are."""
KEYS: Final = [hashlib.sha256(b"%d" % page).hexdigest() for page in USED]


class DevicePages:
    """Random pages of bfloat16 on `device`, of which `USED` are copied."""

    def __init__(self, device: Device, layout: str, io_backend: str) -> None:
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
        from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

        tokens = DEVICE_PAGES * PAGE_TOKENS
        self._io_backend = io_backend
        self._pool: Any = MHATokenToKVPool(
            tokens, PAGE_TOKENS, torch.bfloat16, HEADS, HEAD_DIM, LAYERS, device, False
        )
        self.host: Any = MHATokenToKVPoolHost(
            self._pool._mha_buffer_info(),
            HOST_PAGES / DEVICE_PAGES,
            0,
            PAGE_TOKENS,
            layout,
            pin_memory=device == "cuda",
            allocator_type="shm",
            device_capacity_tokens=tokens,
            start_layer=0,
            end_layer=LAYERS,
        )
        for buffer in self._buffers:
            buffer.normal_()
        self._wanted = [buffer.clone() for buffer in self._buffers]
        self.host_indices: torch.Tensor = self.host.alloc(len(USED) * PAGE_TOKENS)
        self._device_indices = torch.cat(
            [torch.arange(page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS) for page in USED]
        )
        # as SGLang's cache controller does: a kernel reads indices on the device, a direct copy on the host
        self._where = device if io_backend == "kernel" else "cpu"

    @property
    def _buffers(self) -> list[torch.Tensor]:
        return [*self._pool.k_buffer, *self._pool.v_buffer]

    def to_host(self) -> None:
        """Copy the used pages to host memory."""
        host, device = self.host_indices.to(self._where), self._device_indices.to(self._where)
        self.host.backup_from_device_all_layer(self._pool, host, device, self._io_backend)
        self._wait()

    def from_host(self) -> None:
        """Copy them back."""
        host, device = self.host_indices.to(self._where), self._device_indices.to(self._where)
        for layer in range(LAYERS):
            self.host.load_to_device_per_layer(self._pool, host, device, layer, self._io_backend)
        self._wait()

    def forget_device(self) -> None:
        """Zeros in all pages of the device."""
        for buffer in self._buffers:
            buffer.zero_()
        self._wait()

    def check(self) -> None:
        """The used pages are as at first; the others are as `forget_device` left them."""
        used = self._device_indices.to(self._buffers[0].device)
        for found, wanted in zip(self._buffers, self._wanted, strict=True):
            rest = found.clone()
            rest[used] = 0
            assert torch.equal(found[used], wanted[used]), "a page came back changed"
            assert not bool((rest != 0).any()), "a page was written that was not asked for"

    @contextmanager
    def in_pool(self, config: PoolClientConfig) -> Iterator[RankPages]:
        """The way of these pages to a pool, as HiCache's backend takes it."""
        parts = {KV: HostPool(self.host, (b"",))}
        access = RankPages(config, "gpu-check", {"check": "1"}, parts, name="gpu-check")
        try:
            yield access
        finally:
            access.close()

    def _wait(self) -> None:
        if self._buffers[0].is_cuda:
            torch.cuda.synchronize()
