"""SGLang on a machine without an accelerator.

SGLang's scheduler, radix cache and HiCache run on CPU tensors, but a few of the pieces they stand on exist
for CUDA only. This package supplies those, and nothing else:

| piece | why SGLang on CPU lacks it | module |
|---|---|---|
| `sgl_kernel` | the CUDA build cannot be imported without libcuda, yet CPU code imports names from it |
`stand_in` | | streams, events | `torch.cpu.Event` takes no arguments and cannot time; `Stream` cannot
synchronise | `streams` | | device-host page copies | CUDA kernels only, for both layouts of
`--hicache-io-backend direct` | `copies` | | pinned host memory | pinning needs a GPU driver | `hooks` |
| 10 GiB host memory reserve | meant for GPU hosts; leaves nothing on a small machine | `hooks` |
| attention over a cached prefix | `torch_native` recomputes attention of every cached token on each extend |
`attention` | | page hashes | the native extension needs a compiler and OpenSSL headers on first use |
`hashing` | | a pause while pages move | the scheduler polls, and takes the processor from those who move
them | `hooks` |

Order matters: `stand_in.install()` before the first import of `sglang.srt` in each process, `hooks.apply()`
after it and before the scheduler is built. `pdserve.engine.sglang.children.entry` and
`pdserve.engine.sglang.plugin` see to both.
"""
