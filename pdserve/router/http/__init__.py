"""Connections from clients: HTTP/1.1 on asyncio, requests and their answers, the listening socket.

May import `config` and `metrics`, and of `pdserve` only what stands below the router.
"""
