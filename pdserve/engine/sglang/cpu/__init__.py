"""SGLang on a machine without an accelerator.

SGLang's scheduler, radix cache and HiCache run on CPU tensors, but a few of the pieces they stand on exist
for CUDA only. This package supplies those, and nothing else:

| piece | why SGLang on CPU lacks it | module |
|---|---|---|
| `sgl_kernel` | its CUDA build cannot be imported without libcuda | `stand_in` |
| streams, events | `torch.cpu.Event` takes no arguments; `Stream` cannot synchronise | `replacements` |
| device-host page copies | there are CUDA kernels only | `copies` |
| pinned host memory | pinning needs a GPU driver | `hooks` |
| 10 GiB host memory reserve | meant for GPU hosts; leaves nothing on a small machine | `hooks` |
| attention over a cached prefix | `torch_native` attends to every cached token again | `attention` |
| page hashes | the native extension needs a compiler and OpenSSL headers | `replacements` |
| indices of pages for a direct hand-off | they are staged in pinned memory behind a CUDA event | `hooks` |
| a pause while pages move | the scheduler polls, and takes the core from the moving threads | `hooks` |

Order matters: `stand_in.install()` before the first import of `sglang.srt` in each process, `hooks.apply()`
after it and before the scheduler is built. `pdserve.engine.sglang.children.entry` and
`pdserve.engine.sglang.plugin` see to both.
"""
