"""Other people's software on pdserve's pool: it runs in their process, and imports what pdserve does not install.

Here are workers of NVIDIA Dynamo, which are SGLang's; `lmcache` and `vllm` have a folder each. The two import the
pool's client, and what that imports.
"""
