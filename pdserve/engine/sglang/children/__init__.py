"""What runs in the processes that SGLang starts: their entry points, and what is changed in the scheduler.

May import: `engine.sglang.prepare`, kvpool.hicache.
"""
