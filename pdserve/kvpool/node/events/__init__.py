"""Events of the node's pages for routers of other stacks, over ZeroMQ (formats: protocol/kv_events.py).

Only here is ZeroMQ used, and only where events are configured.
"""
