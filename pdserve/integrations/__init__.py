"""Other people's software on pdserve's pool. It runs in their process, and imports what pdserve has not.

Here are workers of NVIDIA Dynamo, which are SGLang's. `lmcache` and `vllm` have a folder each, and import the
pool's client, and what that imports.
"""
