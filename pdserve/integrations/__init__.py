"""Other serving stacks on pdserve's pool, in their own processes: LMCache's server, NVIDIA Dynamo's workers.

`lmcache` imports the pool's client only, because LMCache's environment has no SGLang.
"""
