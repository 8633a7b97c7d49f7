"""The parts of a router put together: the ASGI application, its routes, its start and end.

May import every folder but `admin` and `processes`.
"""
